"""Infilling: is a hole in a known text filled right more often than the model writes the same text from left to right?

``python benchmarks/infilling.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from arguments import Docs, Out
from environment import begin
from in_process import engine
from record import CHECKPOINTS, RESULTS
from sheet import Sheet, Wanted, publish, wanted_sheet
from transformers import PreTrainedTokenizerFast

from vllm_dllm.observe.stats import request_stats
from vllm_dllm.options.schema import CacheName
from vllm_dllm.tiny.arithmetic import Problem, make_problems
from vllm_dllm.tiny.text import render_prompt

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

SEED = 0
MODELS = ("tiny-llada", "tiny-dream")
CACHES: tuple[CacheName, ...] = ("none", "prefix", "dual")
EQUATION = re.compile(r"\d+ [+*-] \d+ = \d+")


@dataclass(frozen=True)
class Case:
    """A text whose first equation is left out.

    Attributes:
        before, hole, behind: token ids.
    """

    before: list[int]
    hole: list[int]
    behind: list[int]


@dataclass(frozen=True)
class Row:
    """Answers of one model in one way."""

    model: str
    decoding: str
    requests: int
    right: int
    nfe: int

    @property
    def tokens_right(self) -> float:
        return self.right / self.requests


def make_case(problem: Problem, tokenizer: Any) -> Case:
    """A problem with its answer, of which the first equation is the hole."""
    found = EQUATION.search(problem.answer_text)
    assert found is not None
    text = render_prompt(problem.question) + problem.answer_text
    begin, end = (len(text) - len(problem.answer_text) + at for at in found.span())
    coded = tokenizer(text + "<|im_end|>", return_offsets_mapping=True, add_special_tokens=False)
    ids, offsets = coded["input_ids"], coded["offset_mapping"]
    inside = [index for index, (first, last) in enumerate(offsets) if first < end and last > begin]
    return Case(ids[: inside[0]], ids[inside[0] : inside[-1] + 1], ids[inside[-1] + 1 :])


def measure(llm: "LLM", model: str, cache: CacheName, cases: list[Case]) -> list[Row]:
    """The hole filled in, and the same number of tokens behind the same beginning; one token per step, greedy."""
    from vllm import SamplingParams

    mask = llm.llm_engine.vllm_config.model_config.hf_config.mask_token_id
    options = {"dllm_policy": "static"}
    prompts = {
        f"filled in, cache={cache}": [case.before + [mask] * len(case.hole) + case.behind for case in cases],
        f"from left to right, cache={cache}": [case.before for case in cases],
    }
    rows = []
    for decoding, texts in prompts.items():
        args = {**options, "dllm_infill": True} if decoding.startswith("filled") else options
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=len(case.hole), ignore_eos=True, detokenize=False, extra_args=args
            )
            for case in cases
        ]
        outputs: list[RequestOutput] = llm.generate(
            [{"prompt_token_ids": text} for text in texts], params, use_tqdm=False
        )
        right = sum(list(o.outputs[0].token_ids) == case.hole for o, case in zip(outputs, cases, strict=True))
        rows.append(Row(model, decoding, len(cases), right, sum(request_stats(o).nfe for o in outputs)))
    return rows


def sheets(rows: list[Row]) -> list[Sheet]:
    """The tables."""
    targets: list[Wanted] = []
    for filled, written in zip(rows[::2], rows[1::2], strict=True):
        targets.append(
            (
                f"{filled.model}, {filled.decoding}: right more often than from left to right",
                f"above {written.tokens_right:.1%}",
                f"{filled.tokens_right:.1%}",
                filled.right > written.right,
            )
        )
    return [
        wanted_sheet(targets),
        Sheet(
            "Holes of one equation in known answers",
            ["model", "decoding", "requests", "right", "forwards"],
            [[r.model, r.decoding, str(r.requests), f"{r.tokens_right:.1%}", str(r.nfe)] for r in rows],
        ),
    ]


def main(
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 400,
    out: Out = RESULTS,
    docs: Docs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems and one cache: does it work?")] = False,
) -> None:
    """Fill in the first equation of known answers, and write it from left to right."""
    console, environment = begin()
    rows: list[Row] = []
    chosen = make_problems(8 if quick else problems, SEED, "test")
    for model in MODELS:
        checkpoint = CHECKPOINTS / model
        tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
        cases = [make_case(problem, tokenizer) for problem in chosen]
        for cache in CACHES[-1:] if quick else CACHES:
            console.print(f"[bold]{model}, cache={cache}")
            dllm = {"cache": cache, "block_length": 16}
            with engine(checkpoint, dllm, dtype="float32", eager=True, max_num_seqs=64, rows=16384) as llm:
                rows += measure(llm, model, cache, cases)
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    publish(console, sheets(rows), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
