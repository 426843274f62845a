"""The rule of multi-block decoding: which blocks have begun, which are fully activated, and what each unmasks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from tests.reference.decode import Options, Prediction
from tests.reference.multi_block import MultiBlock, choose
from vllm_dllm.decoding.policies import PolicyParams, unmask
from vllm_dllm.decoding.schedules import multi_block_progress, share_level
from vllm_dllm.methods import Policy

MASK = 9
LENGTH = 4
sixteenths = st.integers(0, 16).map(lambda n: n / 16)


def params_of(threshold: float, full: torch.Tensor | None) -> PolicyParams:
    one = torch.ones(1)
    return PolicyParams(
        policy=torch.tensor([int(Policy.MULTI_BLOCK)]),
        quota=one.long(),
        threshold=one * threshold,
        entropy_bound=one,
        relaxed_threshold=one,
        radius=one.long(),
        full=full,
    )


def unmasked(
    masked: list[bool], confidence: list[float], first: int, rule: MultiBlock, *, inclusive: bool = False
) -> list[int]:
    """Columns that a step unmasks of a window whose first ``first`` columns are not the request's."""
    is_masked, columns = torch.tensor([masked]), torch.arange(len(masked))
    generated = (columns >= first).unsqueeze(0)
    levels = (
        torch.tensor([share_level(rule.block_add_threshold)]),
        torch.tensor([share_level(rule.decoded_token_threshold)]),
    )
    begun, full = multi_block_progress(is_masked & generated, generated, *levels, LENGTH)
    chosen = unmask(
        is_masked & generated & begun.repeat_interleave(LENGTH, dim=1),
        torch.tensor([confidence]),
        None,
        params_of(rule.threshold, full),
        threshold_inclusive=inclusive,
        present={Policy.MULTI_BLOCK},
    )
    return columns[chosen[0]].tolist()


@examples(200)
@given(st.data(), st.integers(1, 4), sixteenths, sixteenths, sixteenths, st.booleans())
def test_a_step_unmasks_what_the_plain_reference_unmasks(
    data: st.DataObject, blocks: int, threshold: float, add: float, full: float, inclusive: bool
) -> None:
    width = blocks * LENGTH
    masked = data.draw(st.lists(st.booleans(), min_size=width, max_size=width))
    confidence = data.draw(st.lists(sixteenths, min_size=width, max_size=width))
    first = data.draw(st.integers(0, LENGTH - 1))
    rule = MultiBlock(
        window_blocks=blocks,
        threshold=threshold,
        block_add_threshold=max(add, 1 / 16),
        decoded_token_threshold=full,
    )
    expected = choose(
        [MASK if is_masked else 0 for is_masked in masked],
        [[i for i in range(start, start + LENGTH) if i >= first] for start in range(0, width, LENGTH)],
        {i: Prediction(0, confidence[i], 0.0, torch.zeros(1)) for i in range(width)},
        Options(block_length=LENGTH, mask_id=MASK, threshold_inclusive=inclusive),
        rule,
    )
    assert unmasked(masked, confidence, first, rule, inclusive=inclusive) == sorted(expected)


def test_the_published_thresholds_on_a_window_of_three_blocks() -> None:
    rule, low = MultiBlock(window_blocks=3), [0.5, 0.4, 0.3, 0.2]
    # Nothing is decoded: one block has begun.
    assert unmasked([True] * 12, low * 3, 0, rule) == [0]
    # A quarter of the first block is: the second has begun, and unmasks what is certain.
    assert unmasked([False] + [True] * 11, low * 3, 0, rule) == [1]
    assert unmasked([False] + [True] * 11, [*low, 0.1, 0.95, 0.1, 0.1, *low], 0, rule) == [1, 5]
    # The first block is decoded: the second is fully activated, and the third has not begun.
    assert unmasked([False] * 4 + [True] * 8, low * 2 + [0.95] * 4, 0, rule) == [4]
    # What is emitted counts as decoded, and a prompt's part of a block does not count.
    assert unmasked([False] * 4 + [True] * 8, low * 3, 4, rule) == [4]
    assert unmasked([False] * 3 + [True] * 9, [0.99] * 12, 3, rule) == [3]


def test_shares_are_compared_exactly() -> None:
    """19 of 20 positions are 0.95 of them, and 1 of 10 is 0.1, whatever floats make of that."""
    for decoded, length, share in ((19, 20, 0.95), (1, 10, 0.1), (29, 100, 0.29), (7, 25, 0.28)):
        masked = torch.tensor([[False] * decoded + [True] * (2 * length - decoded)])
        level = torch.tensor([share_level(share)])
        for less in (0, 1):
            masked[0, decoded - less] = True
            seen = masked.clone()
            seen[0, decoded - 1] = bool(less)
            begun, full = multi_block_progress(seen, torch.ones_like(seen), level, level, length)
            assert begun.tolist() == full.tolist() == [[True, not less]]


def test_blocks_behind_one_that_has_not_begun_have_not_begun() -> None:
    masked = torch.tensor([[True] * 4 + [False] * 4 + [True] * 4])
    level = torch.tensor([share_level(0.1)])
    begun, full = multi_block_progress(masked, torch.ones_like(masked), level, level, LENGTH)
    assert begun.tolist() == [[True, False, False]]
    assert full.tolist() == [[True, False, True]]
