"""FreeDave on short blocks: drafts within a block, and drafts that reach into the next ones (``eager``).

``python benchmarks/short_blocks.py --help``; ``docs/benchmarks.md`` says what is compared and how.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from answers import Answers, answer, first, right_answers
from arguments import TINY_SDAR, Docs, Out, Repetitions, Sdar
from environment import begin
from in_process import decode, engine
from published import FREEDAVE
from record import RESULTS
from rich.console import Console
from sheet import Sheet, Wanted, publish, wanted_sheet
from step_skipping_settings import STATIC, THRESHOLD, Setting
from workload import Workload, arithmetic

if TYPE_CHECKING:
    from vllm import LLM

BLOCK_LENGTH = 4
"""TraDo's."""
MAX_TOKENS = 64
GAIN = 2.6
"""Tokens per forward over static that are wanted: what the paper reports of TraDo-4B on GSM8K."""
POLICY_NAMES = (STATIC, THRESHOLD)
CONCURRENT = (1, 16, 64)
TIMED_REQUESTS = {1: 6, 16: 16, 64: 64}


@dataclass(frozen=True)
class Windows:
    """An engine: room for drafts, and whether these reach into the next blocks."""

    drafts: int
    """As FreeDave counts them: the block itself is one. 1: no drafts."""
    eager: bool

    @property
    def name(self) -> str:
        if self.drafts == 1:
            return "no drafts"
        return f"d={self.drafts}" + (", eager" if self.eager else "")

    @property
    def options(self) -> dict[str, Any]:
        given = {"block_length": BLOCK_LENGTH, "max_drafts": self.drafts - 1}
        return given | ({"eager": True} if self.eager else {})

    @property
    def branch_rows(self) -> int:
        """Rows of the block, or of the window, and of every draft of it."""
        blocks = 1 - (-self.drafts // BLOCK_LENGTH) if self.eager else 1
        return blocks * BLOCK_LENGTH

    def rows(self, answers: Answers) -> int:
        """That all forwards of the requests computed. Without windows a finished block is computed once more."""
        commits = 0 if self.eager else sum(-(-len(tokens) // BLOCK_LENGTH) - 1 for tokens in answers.tokens)
        return (answers.forwards + answers.drafted + commits) * self.branch_rows

    def setting(self, policy: str) -> Setting:
        """As a request asks for it."""
        return Setting(policy) if self.drafts == 1 else Setting(policy, "freedave", self.drafts)


NO_DRAFTS = Windows(1, eager=False)
ENGINES = (NO_DRAFTS, Windows(8, eager=False), *(Windows(drafts, eager=True) for drafts in (4, 6, 8, 12)))


@dataclass(frozen=True)
class Row:
    """One engine and policy.

    Attributes:
        gain: tokens per forward over those of the policy without drafts.
        equal: requests with the policy's tokens.
        rows_per_token: rows computed for every token, over those of the policy without drafts.
    """

    policy: str
    engine: str
    requests: int
    accuracy: float
    equal: int
    tokens_per_forward: float
    gain: float
    rows_per_token: float
    rows_ratio: float


@dataclass(frozen=True)
class Speed:
    """Tokens per processor second over those without drafts in the same repetition; the median.

    Processor time, so that other programs on the machine count as little as they can.
    """

    policy: str
    engine: str
    concurrent: int
    ratio: float


def measure_quality(engines: "dict[Windows, LLM]", workload: Workload, console: Console) -> list[Row]:
    """Tokens, forwards and rows of every policy on every engine."""
    rows = []
    for policy in POLICY_NAMES:
        alone: Answers | None = None
        for windows, llm in engines.items():
            console.print(f"{policy}, {windows.name}")
            answers = answer(llm, workload, windows.setting(policy).extra_args())
            alone = alone or answers
            per_token, of_alone = (w.rows(a) / a.num_tokens for w, a in ((windows, answers), (NO_DRAFTS, alone)))
            rows.append(
                Row(
                    policy,
                    windows.name,
                    len(answers.tokens),
                    fmean(right_answers(workload, answers)),
                    answers.equal(alone),
                    answers.tokens_per_forward,
                    answers.tokens_per_forward / alone.tokens_per_forward,
                    per_token,
                    per_token / of_alone,
                )
            )
    return rows


def measure_speed(engines: "dict[Windows, LLM]", workload: Workload, repetitions: int, console: Console) -> list[Speed]:
    """Tokens per processor second, the engines by turns, one request at a time and several."""
    speeds = []
    for policy in POLICY_NAMES:
        for concurrent in CONCURRENT:
            console.print(f"{policy}, {concurrent} at a time")
            requests = first(workload, TIMED_REQUESTS[concurrent]).requests
            ratios: dict[Windows, list[float]] = {windows: [] for windows in engines}
            for _ in range(repetitions):
                rates = {}
                for windows, llm in engines.items():
                    begun = time.process_time()
                    done = decode(llm, windows.setting(policy), requests, workload.stop_token_ids, concurrent)
                    rates[windows] = sum(map(len, done.tokens)) / (time.process_time() - begun)
                for windows, rate in rates.items():
                    ratios[windows].append(rate / rates[NO_DRAFTS])
            speeds += [Speed(policy, windows.name, concurrent, median(each)) for windows, each in ratios.items()]
    return speeds


def sheets(rows: Sequence[Row], speeds: Sequence[Speed]) -> list[Sheet]:
    """The tables."""
    best = max((row for row in rows if row.policy == STATIC and "eager" in row.engine), key=lambda row: row.gain)
    reached = best.gain >= GAIN and best.equal == best.requests
    target: Wanted = (
        f"blocks of {BLOCK_LENGTH}, {best.policy}, {best.engine}: tokens per forward over no drafts, tokens equal",
        f"at least {GAIN}",
        f"{best.gain:.2f}",
        reached,
    )
    papers = [
        [
            f"{model}, {data} (paper)",
            "d=8, eager",
            "",
            "",
            f"{each.freedave.tokens_per_forward:.2f}",
            f"{gain:.2f}×",
            "",
        ]
        for (model, data), each in FREEDAVE.items()
        if model.startswith("TraDo")
        for gain in [each.freedave.tokens_per_forward / each.static.tokens_per_forward]
    ]
    ratios = {(speed.policy, speed.engine, speed.concurrent): speed.ratio for speed in speeds}
    return [
        wanted_sheet([target], "Targets: short blocks"),
        Sheet(
            f"FreeDave in blocks of {BLOCK_LENGTH}: {rows[0].requests} held-out problems",
            [
                "policy",
                "FreeDave",
                "accuracy",
                "equal",
                "tokens per forward",
                "over no drafts",
                "rows per token, over no drafts",
            ],
            [
                [
                    row.policy,
                    row.engine,
                    f"{row.accuracy:.1%}",
                    f"{row.equal}/{row.requests}",
                    f"{row.tokens_per_forward:.2f}",
                    f"{row.gain:.2f}×",
                    f"{row.rows_per_token:.1f} ({row.rows_ratio:.1f}×)",
                ]
                for row in rows
            ]
            + papers,
        ),
        Sheet(
            "Tokens per second of this CPU's time over no drafts, by requests at a time",
            ["policy", "FreeDave", *map(str, CONCURRENT)],
            [
                [
                    row.policy,
                    row.engine,
                    *(f"{ratios[row.policy, row.engine, concurrent]:.2f}×" for concurrent in CONCURRENT),
                ]
                for row in (rows if speeds else ())
            ],
        ),
    ]


def main(
    checkpoint: Sdar = TINY_SDAR,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 200,
    repetitions: Repetitions = 3,
    out: Out = RESULTS,
    docs: Docs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems, nothing timed: does it work?")] = False,
) -> None:
    """Answer held-out problems in blocks of 4 with drafts in the block, and with drafts in the blocks behind it too."""
    console, environment = begin()
    count = 4 if quick else problems
    most = max(count, 0 if quick else max(TIMED_REQUESTS.values()))
    workload = arithmetic("tiny", checkpoint, most, MAX_TOKENS, BLOCK_LENGTH)
    with ExitStack() as stack:
        engines = {
            windows: stack.enter_context(
                engine(checkpoint, windows.options, dtype="float32", eager=True, max_num_seqs=64, rows=8192)
            )
            for windows in ENGINES
        }
        rows = measure_quality(engines, first(workload, count), console)
        speeds = [] if quick else measure_speed(engines, workload, repetitions, console)
    result = {
        "environment": environment,
        "rows": [asdict(row) for row in rows],
        "speeds": [asdict(speed) for speed in speeds],
    }
    publish(console, sheets(rows, speeds), result, out, docs, __file__)


if __name__ == "__main__":
    typer.run(main)
