"""Multi-block decoding: how many tokens per forward does it give beside one block at a time, and at which accuracy?

``python benchmarks/multi_block.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import Docs, Out
from environment import begin
from record import CHECKPOINTS, RESULTS
from sheet import Sheet, publish, verdict

from vllm_dllm.commands.problems import grade
from vllm_dllm.observe.stats import request_stats
from vllm_dllm.tiny.arithmetic import Problem, make_problems
from vllm_dllm.tiny.text import render_prompt

if TYPE_CHECKING:
    from vllm import LLM

SEED = 0
MODEL = "tiny-sdar"
WINDOW_BLOCKS = 4
MAX_TOKENS = 128
THRESHOLDS = (0.9, 0.7, 0.5)
BLOCK_LENGTHS = (16, 8, 4)
"""The model is trained for blocks of 16."""
RULES = ((0.1, 0.95), (0.5, 0.95), (0.9, 1.0), (0.1, 0.5))
"""``block_add_threshold`` and ``decoded_token_threshold``; D2F's own first."""
WANTED, MOST_LOST = 1.3, 0.02
"""Tokens per forward over those of threshold 0.9, and accuracy that may be lost."""


@dataclass(frozen=True)
class Row:
    """Answers to all problems, decoded in one way."""

    block_length: int
    decoding: str
    threshold: float
    right: int
    requests: int
    tokens: int
    forwards: int

    @property
    def accuracy(self) -> float:
        return self.right / self.requests

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards


def open_engine(block_length: int) -> "LLM":
    from vllm import LLM

    return LLM(
        str(CHECKPOINTS / MODEL),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        seed=SEED,
        additional_config={"dllm": {"block_length": block_length, "eager": WINDOW_BLOCKS}},
    )


def measure(
    llm: "LLM", block_length: int, problems: list[Problem], rules: tuple[tuple[float, float], ...]
) -> list[Row]:
    """One block at a time, and several; greedy."""
    ways: list[tuple[str, float, dict[str, Any]]] = [
        ("threshold", threshold, {"dllm_policy": "threshold"}) for threshold in THRESHOLDS
    ]
    for add, full in rules:
        args = {"dllm_policy": "multi_block", "dllm_block_add_threshold": add, "dllm_decoded_token_threshold": full}
        ways += [(f"multi_block, {add:g} and {full:g}", threshold, args) for threshold in THRESHOLDS]
    return [
        answer(llm, problems, block_length, decoding, threshold, {**args, "dllm_threshold": threshold})
        for decoding, threshold, args in ways
    ]


def answer(
    llm: "LLM", problems: list[Problem], block_length: int, decoding: str, threshold: float, args: dict[str, Any]
) -> Row:
    """All problems in one way."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, extra_args=args)
    outputs = llm.generate([render_prompt(problem.question) for problem in problems], params, use_tqdm=False)
    stats = [request_stats(output) for output in outputs]
    right = sum(
        grade(output.outputs[0].text, problem.final_answer) for output, problem in zip(outputs, problems, strict=True)
    )
    return Row(
        block_length=block_length,
        decoding=decoding,
        threshold=threshold,
        right=right,
        requests=len(problems),
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        forwards=sum(each.nfe for each in stats),
    )


def sheets(rows: list[Row]) -> list[Sheet]:
    """The tables."""
    targets = []
    for block_length in dict.fromkeys(row.block_length for row in rows):
        own = [row for row in rows if row.block_length == block_length]
        base = own[0]
        # At the same threshold: a lower one alone gives more tokens per forward.
        close = [
            row
            for row in own
            if row.decoding.startswith("multi_block")
            and row.threshold == base.threshold
            and row.right >= base.right - MOST_LOST * row.requests
        ]
        best = max(close, key=lambda row: row.tokens_per_forward, default=None)
        gain = 0.0 if best is None else best.tokens_per_forward / base.tokens_per_forward
        of_best = "none" if best is None else best.decoding
        targets.append(
            [
                f"blocks of {block_length}, threshold 0.9: tokens per forward over one block, at most 2 points lost",
                of_best,
                f"{WANTED}",
                f"{gain:.2f}",
                verdict(gain >= WANTED),
            ]
        )
    alone = {(row.block_length, row.threshold): row.tokens_per_forward for row in rows if row.decoding == "threshold"}
    return [
        Sheet("Targets", ["target", "best setting", "wanted", "measured", "result"], targets),
        Sheet(
            f"{rows[0].requests} held-out problems, windows of {WINDOW_BLOCKS} blocks",
            ["blocks of", "decoding", "threshold", "right", "tokens per forward", "over one block"],
            [
                [
                    str(row.block_length),
                    row.decoding,
                    f"{row.threshold:g}",
                    f"{row.accuracy:.1%}",
                    f"{row.tokens_per_forward:.2f}",
                    f"{row.tokens_per_forward / alone[row.block_length, row.threshold]:.2f}×",
                ]
                for row in rows
            ],
        ),
    ]


def main(
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 200,
    out: Out = RESULTS,
    docs: Docs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems and one rule: does it work?")] = False,
) -> None:
    """Answer held-out problems one block at a time, and several blocks at a time."""
    console, environment = begin()
    rows: list[Row] = []
    chosen = make_problems(8 if quick else problems, SEED, "test")
    for block_length in BLOCK_LENGTHS[:1] if quick else BLOCK_LENGTHS:
        console.print(f"[bold]blocks of {block_length}")
        llm = open_engine(block_length)
        rows += measure(llm, block_length, chosen, RULES[:1] if quick else RULES)
        del llm
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    publish(console, sheets(rows), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
