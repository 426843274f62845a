"""The plain reference of FailFast drafts what the golden rounds say, with the same confidences in as many forwards."""

import pytest

from tests.reference.failfast import BlockDrafter
from tests.reference.failfast_golden import FailFastCase, load_failfast

CASES = load_failfast()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_drafts_confidences_and_forwards(case: FailFastCase) -> None:
    drafter = BlockDrafter(case.drafter(), case.rule)
    for round_ in case.rounds:
        drafted = drafter.draft(case.text[: round_["context"]])
        assert drafted.tokens == round_["draft"]
        assert drafted.confidences == pytest.approx(round_["confidences"], abs=2e-5)
        # The golden runs prefill where the text has another full block, and take the token behind from there.
        forwards = [kind for kind, _ in round_["drafter_forwards"] if kind != "prefill"]
        behind_full_block = round_["context"] % 32 == 0
        assert drafted.forwards[behind_full_block:] == forwards
