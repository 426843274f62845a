"""LoRA adapters: how many answers differ from those of a checkpoint with the adapter merged?

``python benchmarks/lora.py --help``; ``docs/lora.md`` says how adapters are served.
"""

import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from adapters import merge, random_adapter, write_adapter
from engine import ROOT
from record import RESULTS
from step_skipping import begin
from step_skipping_report import Sheet, publish

from vllm_dllm.training.arithmetic import make_problems

if TYPE_CHECKING:
    from vllm import LLM

LAYERS = {
    "tiny-sdar": re.compile(r"\.(q|k|v|o|gate|up|down)_proj$"),
    "tiny-llada": re.compile(r"\.(q_proj|k_proj|v_proj|attn_out|ff_proj|up_proj|blocks\.\d+\.ff_out)$"),
}
RANK = 16
SIZE = 0.1
"""Of what an adapter adds, in the standard deviation of each matrix."""
VERIFIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "freedave": {"dllm_verify": "freedave", "dllm_drafts": 3},
}


@dataclass(frozen=True)
class Row:
    """Answers of one model under one verifier: to a third of the prompts without an adapter, to the others with one of
    two."""

    model: str
    verifier: str
    prompts: int
    changed: int
    """Answers that are not the base model's."""
    differing: int
    """Answers that are not those of the checkpoint with the adapter merged."""
    tokens_per_second: float
    """Of the batch with both adapters and none."""
    base_tokens_per_second: float
    """Of the base model alone, for as many prompts."""


def start(checkpoint: Path, **more: Any) -> "LLM":
    from vllm import LLM

    return LLM(
        str(checkpoint),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        max_num_batched_tokens=16384,
        kv_cache_memory_bytes=1 << 28,
        block_size=32,
        enforce_eager=True,
        seed=0,
        additional_config={"dllm": {"max_drafts": 3}},
        **more,
    )


def answers(
    llm: "LLM", questions: list[str], options: dict[str, Any], adapters: list[Any] | None = None
) -> tuple[list[list[int]], float]:
    """Greedy answers, and tokens per second."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=48, extra_args=options)
    chats: Any = [[{"role": "user", "content": question}] for question in questions]
    began = time.perf_counter()
    outputs = llm.chat(chats, params, use_tqdm=False, lora_request=adapters)
    seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, sum(map(len, tokens)) / seconds


def measure(model: str, questions: list[str], folder: Path) -> list[Row]:
    from vllm.lora.request import LoRARequest

    source = ROOT / "checkpoints" / model
    checkpoints, requests = [source], [None]
    for number in (1, 2):
        pairs = random_adapter(source, LAYERS[model], rank=RANK, seed=number, size=SIZE)
        path = write_adapter(pairs, folder / f"adapter-{number}")
        checkpoints.append(merge(source, pairs, folder / f"merged-{number}"))
        requests.append(LoRARequest(f"adapter-{number}", number, str(path)))
    # An engine that ends takes the process groups of others in its process along, so that these come first.
    wanted = {name: [] for name in VERIFIERS}
    for checkpoint in checkpoints:
        llm = start(checkpoint)
        for name, options in VERIFIERS.items():
            wanted[name].append(answers(llm, questions, options))
        del llm
    llm = start(source, enable_lora=True, max_loras=2, max_lora_rank=RANK)
    chosen = [row % 3 for row in range(len(questions))]
    rows = []
    for name, options in VERIFIERS.items():
        found, speed = answers(llm, questions, options, [requests[each] for each in chosen])
        right = [wanted[name][each][0][row] for row, each in enumerate(chosen)]
        rows.append(
            Row(
                model,
                name,
                len(questions),
                changed=sum(a != b for a, b in zip(found, wanted[name][0][0], strict=True)),
                differing=sum(a != b for a, b in zip(found, right, strict=True)),
                tokens_per_second=speed,
                base_tokens_per_second=wanted[name][0][1],
            )
        )
    return rows


def main(
    prompts: Annotated[int, typer.Option(min=3, help="Prompts of each batch.")] = 200,
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = RESULTS,
    docs: Annotated[Path | None, typer.Option(help="Page that gets the tables.")] = None,
) -> None:
    """Answer with two adapters and none in one batch, and compare with checkpoints that have an adapter merged."""
    console, environment = begin()
    questions = [problem.question for problem in make_problems(prompts, 0, "test")]
    rows: list[Row] = []
    for model in LAYERS:
        console.print(f"[bold]{model}")
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(model, questions, Path(folder))
    differing = sum(row.differing for row in rows)
    tables = [
        Sheet(
            "Targets",
            ["target", "wanted", "measured", "result"],
            [["answers that differ from a merged checkpoint's", "0", str(differing), "miss" if differing else "pass"]],
            1,
        ),
        Sheet(
            "Adapters",
            ["model", "verifier", "prompts", "changed", "differ from merged", "tokens/s", "tokens/s without adapters"],
            [
                [
                    row.model,
                    row.verifier,
                    *map(str, (row.prompts, row.changed, row.differing)),
                    f"{row.tokens_per_second:.0f}",
                    f"{row.base_tokens_per_second:.0f}",
                ]
                for row in rows
            ],
        ),
    ]
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    publish(console, tables, result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
