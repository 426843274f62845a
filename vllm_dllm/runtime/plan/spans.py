"""Which positions of a request a step computes, for models with full attention.

The sequence of such a request is its prompt, its finished blocks, the block being denoised and masks behind the block,
up to the end of a window. A *refresh* computes the whole sequence. Between refreshes the K/V of some positions stays as
it was (Fast-dLLM, arXiv 2505.22618):

==========  ========================================  =============================================
cache       computed in a step                        kept from the refresh
==========  ========================================  =============================================
``none``    everything: each step is a refresh
``prefix``  the current block and what is behind it   what is before the block
``dual``    the current block                         what is before the block, and what is behind
==========  ========================================  =============================================

Scheduler and workers count rows and pages with the same functions, of numbers, or of arrays or tensors of one shape.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_dllm.geometry import Geometry
from vllm_dllm.options.schema import CacheName


def cdiv(number: Any, divisor: int) -> Any:
    """Ceiling division of a number, an array or a tensor."""
    return -(number // -divisor)


class Span(NamedTuple):
    """Positions from ``start`` up to ``end``."""

    start: Any
    end: Any

    @property
    def length(self) -> Any:
        """Number of positions."""
        return self.end - self.start


@dataclass(frozen=True)
class Spans:
    """What an engine computes of its requests."""

    cache: CacheName
    block_length: int
    generation_window: int
    """Positions from the current block on that are part of the sequence, whole blocks."""

    @classmethod
    def of(cls, geometry: Geometry) -> "Spans":
        """The spans of an engine of a model with full attention."""
        cache, window = geometry.options.cache, geometry.options.generation_window
        assert cache is not None and window is not None
        return cls(cache, geometry.block_length, window)

    def text_end(self, prompt_length: int, max_tokens: int, *, infill: bool) -> int:
        """Position behind the last block of a request, whose blocks begin at the end of the prompt.

        The last block is denoised whole, but not where the request fills in masks: there are no more of them.
        """
        return prompt_length + (max_tokens if infill else cdiv(max_tokens, self.block_length) * self.block_length)

    def window_end(self, block_start: Any, text_end: Any) -> Any:
        """Position behind the last mask of the sequence."""
        return np.minimum(text_end, block_start + self.generation_window)

    def draft(self, block_start: Any, window_end: Any) -> Span:
        """What a forward computes of a draft."""
        end = np.minimum(block_start + self.block_length, window_end) if self.cache == "dual" else window_end
        return Span(0 * block_start if self.cache == "none" else block_start, end)

    def sequence(self, block_start: Any, window_end: Any, refresh: Any) -> Span:
        """What a forward computes of the sequence as it stands."""
        start, end = self.draft(block_start, window_end)
        return Span(np.where(refresh, 0, start), np.where(refresh, window_end, end))


def pages_of_a_request(geometry: Geometry, max_model_len: int, page_size: int) -> int:
    """K/V pages that a request has at most."""
    longest_text = geometry.longest_text(max_model_len)
    pages = cdiv(longest_text, page_size)
    if geometry.options.has_room_for_guidance:
        # A step computes the sequence and its unconditional branch.
        pages = max(pages, 2 * cdiv(min(longest_text, geometry.step_rows // 2), page_size))
    return pages
