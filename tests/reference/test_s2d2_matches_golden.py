"""The plain reference of S2D2 does what the published code does."""

import functools
import os
from pathlib import Path

import pytest

from tests.reference.golden import golden_or_skip
from tests.reference.model import ReferenceModel
from tests.reference.s2d2 import Decoded, decode
from tests.reference.s2d2_golden import FAMILIES, OfficialDraws, S2D2Case, S2D2Golden, load_s2d2

SOME = 3
"""Cases of a family and kind of route, the shortest, unless ``VLLM_DLLM_ALL_S2D2`` is set: all take minutes."""


@pytest.fixture(scope="module")
def golden() -> S2D2Golden:
    return golden_or_skip(load_s2d2)


@functools.cache
def model_of(checkpoint: Path) -> ReferenceModel:
    return ReferenceModel(checkpoint)


def cases_of(golden: S2D2Golden, family: str) -> list[S2D2Case]:
    cases = [case for case in golden.cases if case.family == family]
    if os.environ.get("VLLM_DLLM_ALL_S2D2"):
        return cases
    cases.sort(key=lambda case: (case.drafts + sum(length for _, length in case.spans), case.name))
    some = [case for route in ("span", "score", "hysteresis") for case in _of_route(cases, route)]
    # LLaDA2 has none of them, and the published code's Fast-dLLM v2 one that is the paper's.
    return some + [case for case in cases if case.rule.causal_drafts and case not in some][:1]


def _of_route(cases: list[S2D2Case], route: str) -> list[S2D2Case]:
    return [case for case in cases if case.rule.route == route][: SOME if route == "span" else 1]


def differences(case: S2D2Case, got: Decoded) -> list[str]:
    found = {
        "tokens": (got.canvas[: len(case.tokens)], case.tokens),
        "forwards": ((got.drafts, got.verifications), (case.drafts, case.verifications)),
        "spans": (got.spans, case.spans),
        "accepted": (got.accepted, case.accepted),
    }
    different = [name for name, (ours, official) in found.items() if ours != official]
    if case.scores and got.scores != pytest.approx(case.scores[: len(got.scores)], abs=2e-5):
        different.append("scores")
    return different


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_equals_the_published_code(family: str, golden: S2D2Golden) -> None:
    failures = []
    for case in cases_of(golden, family):
        got = decode(
            model_of(case.checkpoint), case.prompt, case.max_new_tokens, case.options, case.rule, OfficialDraws(case)
        )
        if different := differences(case, got):
            failures.append(f"{case.name}: {', '.join(different)}")
    assert not failures, failures


def test_what_is_skipped_is_said_why(golden: S2D2Golden) -> None:
    assert len(golden.cases) + len(golden.skipped) == 194
    assert len(golden.skipped) <= 37
