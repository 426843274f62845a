"""FailFast's rule alone: which drafts are verified never depends on what they are."""

import pytest
import torch

from vllm_dllm.decoding import failfast
from vllm_dllm.decoding.failfast import Growth

REQUESTS, DRAFTS = 40_000, 16


@pytest.mark.parametrize(("first", "step", "size"), [(10, 8, 8), (4, 8, 8), (4, 4, 8), (2, 2, 8), (1, 3, 4), (4, 4, 4)])
@pytest.mark.parametrize("known", [32, 37])
def test_drafts_that_are_drawn_are_distributed_as_the_target(first: int, step: int, size: int, known: int) -> None:
    """Of two tokens, with drafter and target (1/2, 1/2). The drafter is sure only where the last draft is token 0."""
    generator = torch.Generator().manual_seed(first + 100 * step)
    growth = Growth(
        first=first,
        step=step,
        most=60,
        threshold=0.45,
        unmask_threshold=0.05,
        sub_block_length=size,
        block_length=32,
        shifted=False,
        num_drafts=DRAFTS,
        limit=10**6,
    )
    drafts = failfast.begin(growth, torch.full((REQUESTS,), known))
    whole = torch.ones(REQUESTS, dtype=torch.bool)
    for _ in range(failfast.forwards_of_one_each(growth)):
        asked = failfast.ask(growth, drafts)
        tokens = torch.randint(0, 2, asked.positions.shape, generator=generator)
        count = drafts.is_filled.sum(dim=1)
        last = drafts.tokens.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        confidences = torch.where((count == 0) | (last == 0), 0.9, 0.1).unsqueeze(1).expand(tokens.shape)
        drafts = failfast.grow(growth, drafts, asked, tokens, confidences, whole)
    # Drafts of the target's own distribution are all accepted. What follows them comes from the target.
    is_draft = torch.arange(DRAFTS) < failfast.lengths(drafts).unsqueeze(1)
    written = torch.where(is_draft, drafts.tokens[:, :DRAFTS], torch.randint(0, 2, is_draft.shape, generator=generator))
    share = (written == 0).double().mean(dim=0)
    # Four standard deviations and more.
    assert (share - 0.5).abs().max() < 0.012
    assert is_draft.sum(dim=1).unique().numel() > 1
