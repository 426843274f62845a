"""Scratch pages: where drafts write their K/V, which have other tokens at the block's own positions.

The pages are set aside when the engine starts, behind the pages that vLLM's pool hands out, for every slot and draft:
no draft can write into a page of a request, and a request that ends or is aborted leaves nothing to release.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_dllm.decoding.records import Progress
from vllm_dllm.geometry import Geometry, geometry_of
from vllm_dllm.kernels.page_copy import PageCopy
from vllm_dllm.runtime.plan.arrays import iota

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def pages_per_draft(num_rows: int, unit: int, page_size: int) -> int:
    """Pages that ``num_rows`` positions may touch which begin at a multiple of ``unit``, a divisor of the page size."""
    return 1 - (num_rows - unit) // -page_size


def pages_of_a_draft(geometry: Geometry, page_size: int) -> int:
    """Scratch pages of one draft. Scheduler and workers count alike."""
    unit = 1 if geometry.traits.blocks_from_prompt else geometry.block_length
    return pages_per_draft(geometry.draft_rows, unit, page_size)


def scratch_pages_of(vllm_config: "VllmConfig", page_size: int) -> int:
    """Pages that an engine sets aside: for all drafts that a step may have."""
    geometry, max_num_seqs = geometry_of(vllm_config), vllm_config.scheduler_config.max_num_seqs
    return max_num_seqs * geometry.max_drafts * pages_of_a_draft(geometry, page_size)


class Copies(NamedTuple):
    """Pages to copy before a forward, in all layers; int64, int64 and bool of one shape, targets distinct."""

    source: torch.Tensor
    target: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True)
class ScratchPages:
    """The scratch pages of a worker."""

    first_page: int
    """Id of the first scratch page; the others follow."""
    max_drafts: int
    pages_per_draft: int
    page_size: int
    copy: PageCopy
    """Copies pages of all layers."""

    def page(self, slots: torch.Tensor, drafts: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Ids of the scratch pages of draft ``drafts``, from 0, of the request in ``slots``; all int64, of one shape.

        Args:
            index: page of the draft, from 0: that of the draft's first position.
        """
        return self.first_page + (slots * self.max_drafts + drafts) * self.pages_per_draft + index

    def copies_before_drafts(
        self,
        progress: Progress,
        settled: torch.Tensor,
        *,
        max_drafts: torch.Tensor,
        slots: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        block_table: torch.Tensor,
    ) -> Copies:
        """What to ``copy`` before the first drafts of a block: the K/V that shares pages with what they compute.

        Args:
            progress: of the D decoding requests; ``prefix_copied`` changes.
            settled: [D] bool: that K/V is in the request's pages, and stays as it is until ``settled`` is false again.
            max_drafts: [D] int64: drafts that the request may have.
            slots, start, end: [D] int64: drafts compute the positions from ``start`` up to ``end``. Positions at or
                behind ``end`` are copied where they share the last page.
            block_table: [D, pages] int32.
        """
        due = (progress.num_drafts > 0) & (progress.prefix_copied == 0) & settled
        drafts, index = iota(self.max_drafts, slots.device), iota(self.pages_per_draft, slots.device)
        wanted = due.unsqueeze(1) & (drafts < max_drafts.unsqueeze(1))  # [D, max_drafts]
        pages = (start // self.page_size).unsqueeze(1) + index  # [D, pages of a draft]
        page_start, page_end = pages * self.page_size, (pages + 1) * self.page_size
        is_touched = page_start < end.unsqueeze(1)
        is_shared = (page_start < start.unsqueeze(1)) | (page_end > end.unsqueeze(1))
        source = block_table.gather(1, pages.clamp(max=block_table.shape[1] - 1)).long()
        target = self.page(slots.view(-1, 1, 1), drafts.unsqueeze(1), index)  # [D, max_drafts, pages of a draft]
        wanted = wanted.unsqueeze(2) & (is_touched & is_shared).unsqueeze(1)
        # Becomes 1 where copies are due, and 0 where nothing is settled; what is due is settled. For a `copy_` PyTorch
        # would compile a form of its own where there is one request.
        given_up = progress.prefix_copied.masked_fill(settled, 0)
        progress.prefix_copied.add_(torch.add(due, given_up, alpha=-1))
        # The copy takes tensors that lie in memory one after the other.
        sources = source.unsqueeze(1).expand_as(target).clone(memory_format=torch.contiguous_format)
        return Copies(sources, target, wanted)
