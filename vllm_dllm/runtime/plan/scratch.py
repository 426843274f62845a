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


def pages_per_draft(num_rows: int, unit: int, page_size: int) -> int:
    """Pages that ``num_rows`` positions may touch which begin at a multiple of ``unit``, a divisor of the page size."""
    return 1 + cdiv(num_rows - unit, page_size)


def pages_of_a_draft(vllm_config: "VllmConfig", page_size: int) -> int:
    """Scratch pages of one draft. Scheduler and workers count alike."""
    hf_config = vllm_config.model_config.hf_config
    if hf_config.traits.attention == "full":
        return pages_per_draft(hf_config.branch_rows, 1, page_size)
    unit = 1 if hf_config.traits.attention == "causal-context" else hf_config.block_length
    return pages_per_draft(hf_config.window_blocks * hf_config.block_length, unit, page_size)


def scratch_pages_of(vllm_config: "VllmConfig", page_size: int) -> int:
    """Pages that an engine sets aside: for all drafts that a step may have."""
    max_drafts = vllm_config.model_config.hf_config.max_drafts
    return vllm_config.scheduler_config.max_num_seqs * max_drafts * pages_of_a_draft(vllm_config, page_size)


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
        self.copy_rest(
            slots, block_start, block_start - block_start % self.page_size + self.page_size, block_table, wanted
        )

    def copy_rest(
        self,
        slots: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        block_table: torch.Tensor,
        wanted: torch.Tensor,
    ) -> None:
        """Copy what stands beside the positions from ``start`` up to ``end`` in their pages to the scratch pages.

        Args:
            slots, start, end: [D] int64.
            block_table: [D, pages] int32.
            wanted: [D, max_drafts] bool.
        """
        first_page = start // self.page_size
        index = torch.arange(self.pages_per_draft, device=slots.device)
        page_start = (first_page.unsqueeze(1) + index) * self.page_size  # [D, pages of a draft]
        touched = page_start < end.unsqueeze(1)
        shared = (page_start < start.unsqueeze(1)) | (page_start + self.page_size > end.unsqueeze(1))
        source = block_table.gather(1, (first_page.unsqueeze(1) + index).clamp(max=block_table.shape[1] - 1)).long()
        drafts = torch.arange(self.max_drafts, device=slots.device).unsqueeze(1)
        target = self.page(slots.view(-1, 1, 1), drafts, index)  # [D, max_drafts, pages of a draft]
        source = source.unsqueeze(1).expand_as(target)
        self.copy(
            source.flatten(1), target.flatten(1), (wanted.unsqueeze(2) & (touched & shared).unsqueeze(1)).flatten(1)
        )
