"""What the benchmark of structured outputs makes of its measurements: targets and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from constraints import TRAINED_FORMS
from sheet import Sheet, Wanted, wanted_sheet

from vllm_dllm.tiny.arithmetic import Form

STEP_COST = 1.3
"""A structured step over a plain one, at most."""
TOKENS = 2.5
"""Tokens per forward of the trained JSON at threshold 0.9, at least."""


@dataclass(frozen=True)
class Row:
    """Answers of one model to requests of one kind of constraint, or of one policy."""

    model: str
    what: str
    requests: int
    complete: int
    invalid: int
    errors: int
    tokens: int
    nfe: int

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(1, self.nfe)


@dataclass(frozen=True)
class Neighbours:
    """Requests without a constraint: alone, and among structured ones."""

    model: str
    requests: int
    changed: int


@dataclass(frozen=True)
class Accuracy:
    """The trained task in one of the trained forms of answers, with a constraint and without."""

    model: str
    form: Form
    policy: str
    constrained: bool
    requests: int
    accuracy: float
    tokens_per_forward: float


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of processor time of a step in which all requests are of one kind, one token per step."""

    model: str
    requests: int
    plain_ms: float
    structured_ms: float
    ratio: float


def sheets(
    rows: Sequence[Row], neighbours: Sequence[Neighbours], accuracies: Sequence[Accuracy], costs: Sequence[StepCost]
) -> list[Sheet]:
    """The tables."""
    invalid, errors = sum(row.invalid for row in rows), sum(row.errors for row in rows)
    changed = sum(each.changed for each in neighbours)
    ratio = max((cost.ratio for cost in costs), default=0.0)
    targets = [
        ("invalid complete answers", "0", str(invalid), invalid == 0),
        ("errors", "0", str(errors), errors == 0),
        ("neighbours whose tokens or forwards changed", "0", str(changed), changed == 0),
        ("a structured step over a plain one", f"at most {STEP_COST}", f"{ratio:.2f}", ratio <= STEP_COST),
        *_accuracy_targets(accuracies),
    ]
    return [
        wanted_sheet(targets),
        Sheet(
            "Requests by kind of constraint and by policy",
            ["model", "kind or policy", "requests", "complete", "invalid", "errors", "tokens per forward"],
            [
                [
                    r.model,
                    r.what,
                    *map(str, (r.requests, r.complete, r.invalid, r.errors)),
                    f"{r.tokens_per_forward:.2f}",
                ]
                for r in rows
            ],
        ),
        Sheet(
            "Requests without a constraint, alone and among the others",
            ["model", "requests", "changed"],
            [[each.model, str(each.requests), str(each.changed)] for each in neighbours],
            1,
        ),
        Sheet(
            "The trained task in the forms of the training",
            ["model", "form", "policy", "constraint", "requests", "right answers", "tokens per forward"],
            [
                [
                    each.model,
                    each.form,
                    each.policy,
                    next(iter(TRAINED_FORMS[each.form])) if each.constrained else "none",
                    str(each.requests),
                    f"{each.accuracy:.0%}",
                    f"{each.tokens_per_forward:.2f}",
                ]
                for each in accuracies
            ],
        ),
        Sheet(
            "Milliseconds of processor time of a step, one token each",
            ["model", "requests", "plain", "structured", "ratio"],
            [
                [
                    each.model,
                    str(each.requests),
                    f"{each.plain_ms:.1f}",
                    f"{each.structured_ms:.1f}",
                    f"{each.ratio:.2f}",
                ]
                for each in costs
            ],
        ),
    ]


def _accuracy_targets(accuracies: Sequence[Accuracy]) -> list[Wanted]:
    """Of the trained JSON and calls at threshold 0.9."""
    by_kind = {(each.form, each.constrained): each for each in accuracies if each.policy == "threshold 0.9"}
    rows: list[Wanted] = []
    for form in ("json", "call"):
        if (form, True) not in by_kind:
            continue
        constrained, free = by_kind[form, True], by_kind[form, False]
        speed = constrained.tokens_per_forward
        names = {"json": "trained JSON", "call": "trained tool calls"}
        rows += [
            (
                f"{names[form]}: tokens per forward at threshold 0.9",
                f"at least {TOKENS}",
                f"{speed:.2f}",
                speed >= TOKENS,
            ),
            (
                f"{names[form]}: right answers at threshold 0.9",
                f"at least {free.accuracy:.0%} (without a constraint)",
                f"{constrained.accuracy:.0%}",
                constrained.accuracy >= free.accuracy,
            ),
        ]
    return rows
