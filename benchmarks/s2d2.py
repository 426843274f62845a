"""S2D2: how many forwards does it take beside its policy alone, and at which accuracy?

``python benchmarks/s2d2.py --help``; ``docs/s2d2.md`` says what S2D2 does.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from answers import answer, right_answers
from arguments import TINY_SDAR, Docs, Out, Sdar
from environment import begin
from in_process import engine
from record import RESULTS
from sheet import Sheet, publish
from workload import arithmetic

MAX_TOKENS = 64
BLOCK_LENGTH = 16
POLICY: dict[str, Any] = {"dllm_policy": "threshold", "dllm_threshold": 0.9}
HYSTERESIS = {"dllm_route": "hysteresis", "dllm_score_cost_per": "token", "dllm_score_on": 1.0, "dllm_score_off": -5.0}
WAYS: dict[str, dict[str, Any]] = {
    "the policy alone": {"dllm_verify": "none"},
    **{f"`always`, `window` {window}": {"dllm_window": window} for window in (2, 4, 8, 16)},
    "`score`, `score_cost` 1": {"dllm_route": "score", "dllm_score_cost": 1.0},
    "`score`, `score_cost` 2": {"dllm_route": "score", "dllm_score_cost": 2.0},
    "`hysteresis`, `score_cost_per` `token`": HYSTERESIS,
}
"""Options of the requests; windows of the engine's own, a whole block, where none is named."""


@dataclass(frozen=True)
class Row:
    """Greedy answers to all problems, decoded in one way."""

    decoding: str
    requests: int
    right: int
    tokens: int
    forwards: int
    drafted: int
    accepted: int


def measure(checkpoint: Path, problems: int) -> list[Row]:
    """All ways in one engine."""
    workload = arithmetic(checkpoint.name, checkpoint, problems, MAX_TOKENS, BLOCK_LENGTH)
    dllm = {"verify": "s2d2", "window": BLOCK_LENGTH, "block_length": BLOCK_LENGTH}
    rows = []
    with engine(checkpoint, dllm, dtype="float32", eager=True, max_num_seqs=16, rows=8192) as llm:
        for name, options in WAYS.items():
            answers = answer(llm, workload, {**POLICY, **options})
            rows.append(
                Row(
                    name,
                    problems,
                    right=sum(right_answers(workload, answers)),
                    tokens=answers.num_tokens,
                    forwards=answers.forwards,
                    drafted=answers.drafted,
                    accepted=sum(stats.accepted for stats in answers.stats),
                )
            )
    return rows


def make_sheet(rows: list[Row]) -> Sheet:
    """The table."""
    return Sheet(
        f"{rows[0].requests} held-out problems, blocks of {BLOCK_LENGTH}, threshold 0.9",
        ["decoding", "right", "forwards", "tokens per forward", "drafts accepted of those verified"],
        [
            [
                row.decoding,
                f"{row.right / row.requests:.1%}",
                str(row.forwards),
                f"{row.tokens / row.forwards:.2f}",
                f"{row.accepted / row.drafted:.2f}" if row.drafted else "",
            ]
            for row in rows
        ],
        num_labels=1,
    )


def main(
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 200,
    checkpoint: Sdar = TINY_SDAR,
    out: Out = RESULTS,
    docs: Docs = None,
) -> None:
    """Answer held-out problems with S2D2 and without."""
    console, environment = begin()
    rows = measure(checkpoint, problems)
    publish(
        console,
        [make_sheet(rows)],
        {"environment": environment, "rows": [asdict(row) for row in rows]},
        out,
        docs,
        __file__,
    )


if __name__ == "__main__":
    typer.run(main)
