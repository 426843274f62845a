"""Multi-block decoding: how many tokens per forward does it give beside one block at a time, and at which accuracy?

``python benchmarks/multi_block.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from answers import answer, of_length, right_answers
from arguments import Docs, Out
from environment import begin
from in_process import engine
from record import CHECKPOINTS, RESULTS
from sheet import Sheet, Wanted, publish, wanted_sheet
from workload import Workload, arithmetic

if TYPE_CHECKING:
    from vllm import LLM

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


def measure(llm: "LLM", workload: Workload, rules: tuple[tuple[float, float], ...]) -> Iterator[Row]:
    """One block at a time, and several; greedy."""
    ways: list[tuple[str, float, dict[str, Any]]] = [
        ("threshold", threshold, {"dllm_policy": "threshold"}) for threshold in THRESHOLDS
    ]
    for add, full in rules:
        args = {"dllm_policy": "multi_block", "dllm_block_add_threshold": add, "dllm_decoded_token_threshold": full}
        ways += [(f"multi_block, {add:g} and {full:g}", threshold, args) for threshold in THRESHOLDS]
    for decoding, threshold, args in ways:
        answers = answer(llm, workload, {**args, "dllm_threshold": threshold})
        yield Row(
            block_length=workload.block_length,
            decoding=decoding,
            threshold=threshold,
            right=sum(right_answers(workload, answers)),
            requests=len(answers.tokens),
            tokens=answers.num_tokens,
            forwards=answers.forwards,
        )


def sheets(rows: list[Row]) -> list[Sheet]:
    """The tables."""
    targets: list[Wanted] = []
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
        name = f"blocks of {block_length}, threshold 0.9: tokens per forward over one block, at most 2 points lost"
        of_best = "none" if best is None else f"{gain:.2f}: {best.decoding}"
        targets.append((name, f"at least {WANTED}", of_best, gain >= WANTED))
    alone = {(row.block_length, row.threshold): row.tokens_per_forward for row in rows if row.decoding == "threshold"}
    return [
        wanted_sheet(targets),
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
    checkpoint = CHECKPOINTS / MODEL
    rows: list[Row] = []
    for block_length in BLOCK_LENGTHS[:1] if quick else BLOCK_LENGTHS:
        console.print(f"[bold]blocks of {block_length}")
        workload = arithmetic(MODEL, checkpoint, 8 if quick else problems, MAX_TOKENS, block_length)
        dllm = {"block_length": block_length, "eager": WINDOW_BLOCKS}
        with engine(checkpoint, dllm, dtype="float32", eager=True, max_num_seqs=32, rows=4096) as llm:
            rows += measure(llm, of_length(workload, MAX_TOKENS), RULES[:1] if quick else RULES)
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    publish(console, sheets(rows), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
