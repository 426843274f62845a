"""What one forward did for a request, from the sampler on the device to the scheduler on the host.

vLLM already copies one integer per request and step beside the tokens, the number of NaN logits, without waiting for
the device. Ours rides there. It is negative, and so no number of NaNs to whoever looks for those.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

_LIMIT = 1 << 7
"""More than any of the counts: ``vllm_dllm.options.schema.MOST_DRAFTS`` is 64."""


class Observation(NamedTuple):
    """One forward of one request."""

    denoised: bool
    """False: the forward only wrote a finished block to the K/V cache."""
    drafted: int
    """Drafts forwarded beside the block itself."""
    accepted: int
    """Denoising steps that accepted drafts have skipped."""
    next_drafts: int
    """Drafts that the request has for its next forward."""
    deepest: int = 0
    """Which of the drafts, from 1, the request went on from; 0: from the block itself. A draft may skip several
    steps, so this is not ``accepted``."""
    drafting: bool = False
    """Whether the step made drafts, for this request or another, or sought in vain to."""


def pack(
    denoised: torch.Tensor,
    drafted: torch.Tensor,
    accepted: torch.Tensor,
    next_drafts: torch.Tensor,
    deepest: torch.Tensor,
    drafting: torch.Tensor | bool,
) -> torch.Tensor:
    """Observations of R requests, each argument [R] int64 or bool, as [R] int32."""
    packed = (((drafting * _LIMIT + deepest) * _LIMIT + next_drafts) * _LIMIT + accepted) * _LIMIT + drafted
    return (-1 - (packed * 2 + denoised)).int()


def pack_plain(denoised: torch.Tensor) -> torch.Tensor:
    """``pack`` of requests [R] that have no drafts and make none; ``denoised`` [R] bool."""
    return -1 - denoised.int()


@lru_cache(maxsize=1 << 12)  # most requests of a step say the same
def unpack(value: int) -> Observation:
    """The observation that ``pack`` made ``value`` of."""
    packed, denoised = divmod(-1 - value, 2)
    packed, drafted = divmod(packed, _LIMIT)
    packed, accepted = divmod(packed, _LIMIT)
    packed, next_drafts = divmod(packed, _LIMIT)
    drafting, deepest = divmod(packed, _LIMIT)
    return Observation(bool(denoised), drafted, accepted, next_drafts, deepest, bool(drafting))
