"""Scratch pages: where drafts write their K/V.

A draft holds other tokens than the block at the block's own positions, so it needs pages of its own for them. They are
set aside when the engine starts, behind the pages that vLLM's pool hands out, for every slot and draft. The pool never
sees them, so a draft can write into nobody's page, and a request that ends or is aborted leaves nothing to release.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.utils.math_utils import cdiv

from vllm_dllm.kernels.page_copy import PageCopy

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def pages_per_draft(window_length: int, block_length: int, page_size: int) -> int:
    """Pages that a window of whole blocks may touch, wherever it starts."""
    return 1 + cdiv(window_length - block_length, page_size)


def scratch_pages_of(vllm_config: "VllmConfig", page_size: int) -> int:
    """Pages that an engine sets aside: for all drafts that a step may have. Scheduler and workers count alike."""
    hf_config = vllm_config.model_config.hf_config
    window_length = hf_config.window_blocks * hf_config.block_length
    per_draft = pages_per_draft(window_length, hf_config.block_length, page_size)
    return vllm_config.scheduler_config.max_num_seqs * hf_config.max_drafts * per_draft


@dataclass(frozen=True)
class ScratchPages:
    """The scratch pages of a worker."""

    first_page: int
    """Id of the first of them; the others follow."""
    max_drafts: int
    pages_per_draft: int
    page_size: int
    copy: PageCopy
    """Copies pages of all layers."""

    def page(self, slots: torch.Tensor, drafts: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Ids of the pages that draft ``drafts`` (from 0) of the request in ``slots`` has for its window.

        Args:
            index: counts the window's pages from 0.
        """
        return self.first_page + (slots * self.max_drafts + drafts) * self.pages_per_draft + index

    def copy_heads(
        self, slots: torch.Tensor, block_start: torch.Tensor, block_table: torch.Tensor, wanted: torch.Tensor
    ) -> None:
        """Copy what stands before the current block in its page to the first scratch page of every draft.

        Args:
            slots: [D] int64.
            block_start: [D] int64.
            block_table: [D, pages] int32.
            wanted: [D, max_drafts] bool: drafts that need it; the page of the others is left alone.
        """
        starts_inside = (block_start % self.page_size > 0).unsqueeze(1)
        source = block_table.gather(1, (block_start // self.page_size).unsqueeze(1)).long()
        drafts = torch.arange(self.max_drafts, device=slots.device)
        target = self.page(slots.unsqueeze(1), drafts, torch.zeros_like(drafts))
        self.copy(source.expand_as(target), target, wanted & starts_inside)
