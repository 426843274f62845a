"""Which tokens a block is given, and which must follow a token, beside the plain rules."""

import random
from collections.abc import Sequence

import pytest
import torch

from tests.reference import thinking as plain
from vllm_dllm.decoding.thinking import NOWHERE, Markers, Reasoning, forced_next, given_to_block, read

LENGTH = 4
MARKERS = [
    ((1,), (2,), (2,)),
    ((1,), (2,), (3, 3, 2)),
    ((1, 1), (2, 3), (3, 2, 3, 3, 2, 3)),
]
"""Start, natural end and forced end; the last is longer than a block, and its beginnings are within it again."""


def tensor(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)])


def marker_tensors(marker: tuple[tuple[int, ...], ...]) -> Markers:
    return Markers(*map(torch.tensor, marker))


def nothing_known() -> Reasoning:
    return Reasoning(torch.tensor([NOWHERE]), torch.tensor([NOWHERE]))


@pytest.mark.parametrize("marker", MARKERS, ids=str)
def test_a_text_that_is_read_block_by_block_gives_each_block_what_the_rule_says(
    marker: tuple[tuple[int, ...], ...],
) -> None:
    draw, markers = random.Random(1), marker_tensors(marker)
    given_at_all = 0
    for _ in range(150):
        text = draw.choices((0, 1, 2, 3), (4, 2, 1, 2), k=6 * LENGTH)
        thinking = plain.Thinking(draw.randrange(8), *marker)
        budget, known = torch.tensor([thinking.budget]), nothing_known()
        padded = [NOWHERE] * markers.context + text
        for start in range(0, len(text), LENGTH):
            # The first block may hold the end of the prompt.
            free = start or draw.randrange(1, LENGTH)
            seen = tensor(padded[max(start - LENGTH, 0) : free + markers.context])
            begins = torch.tensor([max(start - LENGTH, 0) - markers.context])
            at_free = read(seen, begins, known, markers).column(torch.tensor([seen.shape[1] - 1]))
            given = given_to_block(at_free, budget, seen, torch.tensor([free]), torch.tensor([start]), LENGTH, markers)
            expected = plain.given_to_block(text[:free], start + LENGTH, thinking)
            found = {start + c: t for c, t in enumerate(given.tokens[0].tolist()) if t != NOWHERE}
            assert found == expected
            given_at_all += len(expected)
            whole = tensor(padded[start : start + LENGTH + markers.context])
            known = read(whole, torch.tensor([start - markers.context]), known, markers)
            known = known.column(torch.tensor([whole.shape[1] - 1]))
    assert given_at_all > 100


@pytest.mark.parametrize("marker", MARKERS, ids=str)
def test_what_must_follow_each_token_is_what_autoregressive_decoding_forces(
    marker: tuple[tuple[int, ...], ...],
) -> None:
    draw, markers = random.Random(2), marker_tensors(marker)
    forced_at_all = 0
    for _ in range(150):
        text = draw.choices((0, 1, 2, 3), (4, 2, 1, 2), k=12)
        thinking = plain.Thinking(draw.randrange(6), *marker)
        start = draw.randrange(1, len(text) - LENGTH)
        padded = [NOWHERE] * markers.context + text
        before = tensor(padded[: start + markers.context])
        known = read(before, torch.tensor([-markers.context]), nothing_known(), markers)
        known = known.column(torch.tensor([before.shape[1] - 1]))
        seen, begins = tensor(padded[start : start + LENGTH + markers.context]), torch.tensor([start - markers.context])
        reasoning = read(seen, begins, known, markers)
        found = forced_next(seen, begins, reasoning, torch.tensor([thinking.budget]), LENGTH, markers)
        expected = [plain.forced_next(text[: start + i + 1], thinking) for i in range(LENGTH)]
        assert found[0].tolist() == [NOWHERE if token is None else token for token in expected]
        forced_at_all += sum(token is not None for token in expected)
    assert forced_at_all > 50


def test_without_a_budget_nothing_is_given_and_nothing_must_follow() -> None:
    markers, text, start = marker_tensors(MARKERS[0]), tensor([1, 0, 0, 0]), torch.tensor([0])
    known, none = read(text, start, nothing_known(), markers), torch.tensor([-1])
    free = torch.tensor([4])
    given = given_to_block(known.column(torch.tensor([3])), none, text, free, free, LENGTH, markers)
    assert (int(given.number), given.tokens.tolist()) == (0, [[NOWHERE] * LENGTH])
    assert forced_next(text, start, known, none, LENGTH, markers).tolist() == [[NOWHERE] * LENGTH]
