"""Which positions of a request a step computes, for models with full attention.

The text of such a request is its prompt, its finished blocks, the block being denoised and masks behind it, up to the
end of a window. A *refresh* computes all of it. Between refreshes the K/V of some positions stays as it was (Fast-dLLM,
arXiv 2505.22618):

==========  =====================================  ==============================================
cache       computed in a step                     kept from the refresh
==========  =====================================  ==============================================
``none``    everything: each step is a refresh
``prefix``  the current block and all behind it    what is before the block
``dual``    the current block                      what is before the block, and what is behind it
==========  =====================================  ==============================================

Scheduler and worker count alike by what is here. All functions take numbers or arrays of them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_dllm.options.schema import CacheName


class Span(NamedTuple):
    """Positions from ``start`` up to ``end``."""

    start: Any
    end: Any

    @property
    def length(self) -> Any:
        """How many they are."""
        return self.end - self.start


@dataclass(frozen=True)
class Extent:
    """What an engine computes of its requests."""

    cache: CacheName
    block_length: int
    generation_window: int
    """Positions from the current block on that are part of the sequence, whole blocks."""

    def text_end(self, prompt_length: int, max_tokens: int) -> int:
        """Position behind the last block of a request, which begins its blocks at the end of its prompt."""
        return prompt_length + -(-max_tokens // self.block_length) * self.block_length

    def window_end(self, block_start: Any, text_end: Any) -> Any:
        """Position behind the last mask that is part of the sequence."""
        return np.minimum(text_end, block_start + self.generation_window)

    def branch(self, block_start: Any, window_end: Any) -> Span:
        """What a forward computes of a draft."""
        end = block_start + self.block_length if self.cache == "dual" else window_end
        return Span(0 * block_start if self.cache == "none" else block_start, end)

    def root(self, block_start: Any, window_end: Any, refresh: Any) -> Span:
        """What a forward computes of the text as it stands."""
        start, end = self.branch(block_start, window_end)
        return Span(np.where(refresh, 0, start), np.where(refresh, window_end, end))

    def twin_page(self, text_end: Any, page_size: int) -> Any:
        """Pages of a request before those of its twin: the text with its prompt masked, which guidance computes too."""
        return -(-text_end // page_size)
