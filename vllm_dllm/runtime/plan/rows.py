"""The rows of a forward: what each row is, where its K/V goes and what it sees.

A row has a token, a position, a K/V slot and an attention view. Consecutive rows of one request that share a view are a
*group*; vLLM's attention backends take every group for a request of its own, with a block table, a K/V length and a
mask. All K/V of a layer is written before the layer's attention runs, so groups of one forward see each other's K/V
where their block tables have a page in common.

The builders beside this module (`block`, `full`, `drafter`) only say which groups a forward has. K/V slots are computed
here alone: a row's slot lies in the page that the block table of the row's own group has for the row's position, so a
row cannot write where its group does not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_dllm.decoding.records import PerRequest, Progress
from vllm_dllm.runtime.logits.guidance import Guidance
from vllm_dllm.runtime.plan.arrays import iota

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_dllm.runtime.plan.scratch import ScratchPages

PAD_SLOT_ID = -1
"""Slot of rows that write no K/V: vLLM's ``PAD_SLOT_ID``. Plans and their tests do without vLLM."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the plans of an engine have in common while the engine lives."""

    block_length: int
    page_size: int
    """K/V slots per page."""
    limit: int
    """End of the last block that may hold a token: no row writes K/V at or behind this position."""
    shifted: bool
    """Logits of the block being denoised predict the next position."""
    commit_predicts: bool = False
    """As in ``FamilyTraits``."""
    mask_token_id: int
    window_blocks: int = 1
    """Blocks that are denoised together."""
    causal_context: bool = False
    """Rows of prompts and finished blocks see only what is before them, and blocks begin at any position."""
    causal_blocks: bool = False
    """Rows of the block being denoised see only what is before them, too."""
    verifies_causally: bool = False
    """Requests may decode with S2D2, whose drafts' rows see only what is before them."""
    causal_cache: bool = False
    """As in ``DllmConfig``; of engines that verify causally."""
    causal_drafts: bool = False
    """Likewise."""
    scratch: "ScratchPages | None" = None
    """``None``: the engine has no drafts."""

    @property
    def masks_differ(self) -> bool:
        """Groups of decoding requests may be causal, and others of the same step not."""
        return (self.causal_context and not self.causal_blocks) or self.verifies_causally

    @property
    def views_of_a_group(self) -> int:
        """Views of each group of a decoding request: `causal_prefix`."""
        return 2 if self.causal_drafts else 1

    def views_differ_by_verifier(self, drafting: np.ndarray) -> bool:
        """Whether a step has views of S2D2's own kind, given which of the decoding requests may have drafts."""
        return self.verifies_causally and bool(drafting.any() or (self.causal_drafts and len(drafting)))

    @property
    def drafts_share_pages(self) -> bool:
        """Drafts write to pages that hold text before the block, too. Where blocks fill their pages there is none."""
        return self.scratch is not None and (self.causal_context or self.block_length % self.page_size != 0)


class BlockState(NamedTuple):
    """State of the D decoding requests of a step.

    What is denoised is a window of W positions: a block of L, or several where drafts reach into later ones (`eager`).
    """

    progress: Progress
    levels: torch.Tensor
    """[D, max_drafts] int64: denoising steps that each draft is ahead of the block."""
    finished: torch.Tensor
    """[D, L] int64: the block before the window, where ``progress.commit`` is set."""
    branches: torch.Tensor
    """[D, (1 + max_drafts) * W] int64: the window as it stands, with mask tokens, then its drafts."""
    packed: torch.Tensor
    """[D, columns] int64: all of this, side by side; see ``runtime.states.DenoiseStates``."""


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """What vLLM's scheduler gave the R requests of a step; the first D decode, the others prefill. On the host."""

    num_decodes: int
    num_rows: np.ndarray
    """[R] int64."""
    num_draft_rows: np.ndarray
    """[D] int64: rows of each decoding request that vLLM takes for drafts: masks, and drafts behind the masks."""
    computed: np.ndarray
    """[R] int64: positions whose K/V is in the cache."""
    prefill_length: np.ndarray
    """[R] int64: known tokens of each request when it entered; 0 in vLLM's start-up batches."""
    query_start_loc: np.ndarray
    """[R + 1] int32: first row of each request."""
    query_start_loc_on_device: torch.Tensor
    """[R + 1] int32."""
    longest: int
    """No request has more K/V before this step's decoding rows are counted."""

    @classmethod
    def of(cls, batch: "InputBatch", limit: int) -> "Scheduled":
        """Read vLLM's batch, which puts requests with draft rows first. ``limit`` is that of ``Layout``."""
        num_draft_rows = np.zeros(0, dtype=np.int64)
        if batch.num_draft_tokens:
            assert batch.num_draft_tokens_per_req is not None
            num_decodes = int(np.count_nonzero(batch.num_draft_tokens_per_req))
            num_draft_rows = batch.num_draft_tokens_per_req[:num_decodes].astype(np.int64)
            assert (num_draft_rows > 0).all()
        num_reqs = batch.num_reqs
        num_rows = batch.num_scheduled_tokens[:num_reqs].astype(np.int64)
        # vLLM's warm-up counts every row of its steps as computed, masks and drafts too, and may pass the limit.
        known_rows = num_rows.copy()
        known_rows[: len(num_draft_rows)] -= num_draft_rows
        computed = np.minimum(batch.num_computed_tokens_np[:num_reqs], np.maximum(limit - known_rows, 0))
        return cls(
            num_decodes=len(num_draft_rows),
            num_rows=num_rows,
            num_draft_rows=num_draft_rows,
            computed=computed,
            prefill_length=batch.prefill_len_np[:num_reqs].astype(np.int64),
            query_start_loc=batch.query_start_loc_np[: num_reqs + 1],
            query_start_loc_on_device=batch.query_start_loc[: num_reqs + 1],
            longest=int(batch.seq_lens_cpu_upper_bound[:num_reqs].max()),
        )


class Buffers(NamedTuple):
    """vLLM's buffers for the rows of a forward."""

    input_ids: torch.Tensor
    """[rows] int32."""
    positions: torch.Tensor
    """[rows] int64."""
    slot_mapping: torch.Tensor
    """[rows] int64: K/V slot of each row."""
    adapted: torch.Tensor | None = None
    """[rows]: 1 for rows that the draft adapter is for, 0 for others; ``None``: the model has no adapter."""
    is_padding: torch.Tensor | None = None
    """[rows] bool: rows that a mixture of experts need not compute; ``None``: it computes all, or there is none."""

    def first(self, num_rows: int) -> "Buffers":
        """For the first rows of a forward."""
        return Buffers._make(None if buffer is None else buffer[:num_rows] for buffer in self)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a forward, on the device: [G, K] for G groups of K rows, or [rows] with the group of each row."""

    tokens: torch.Tensor
    """int64."""
    positions: torch.Tensor
    """int64; padding has positions that its group's block table has a page for."""
    is_padding: torch.Tensor
    """bool, or [G, 1] where whole groups are padding. Padding writes no K/V, and nothing reads its hidden states."""
    groups: torch.Tensor | None = None
    """[rows] int64: group of each row; ``None``: rows are [G, K]."""
    text_positions: torch.Tensor | None = None
    """int64: what the model takes for the positions, where K/V is in another order than the text."""
    adapted: torch.Tensor | None = None
    """[G, K] or [G, 1] bool: rows, or groups, that the draft adapter is for; ``None``: of none."""
    one_page: bool = False
    """The rows of a group lie in one page ([G, K] only)."""

    def kv_slots(self, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
        """Slot of each row's K/V, int64 in the shape of the rows; ``PAD_SLOT_ID`` for padding.

        Args:
            block_table: [G, pages] int32: page ids that each group sees.
        """
        looked_up = self.positions[:, :1] if self.one_page else self.positions
        index = looked_up // page_size
        pages = block_table.gather(1, index) if self.groups is None else block_table[self.groups, index]
        # page * page_size + position % page_size, in fewer launches.
        slots = torch.add(self.positions, pages - index, alpha=page_size)
        return slots.masked_fill_(self.is_padding, PAD_SLOT_ID)

    def write(self, buffers: Buffers, block_table: torch.Tensor, page_size: int) -> None:
        """Write ids, positions and slots of these rows over the first rows of ``buffers``.

        Args:
            block_table: [G, pages] int32, these rows' groups first.
        """
        num_rows = self.tokens.numel()
        slots = self.kv_slots(block_table, page_size)
        for buffer, values in (
            (buffers.input_ids, self.tokens),
            (buffers.positions, self.positions if self.text_positions is None else self.text_positions),
            (buffers.slot_mapping, slots),
            (buffers.is_padding, self.is_padding.expand_as(self.tokens)),
        ):
            if buffer is not None:
                # Not a slice, whose size a compiled form takes for another one in each buffer: a kernel for each.
                buffer.narrow(0, 0, num_rows).copy_(values.flatten())
        if buffers.adapted is not None and self.adapted is not None:
            buffers.adapted[:num_rows] = self.adapted.expand_as(self.tokens).flatten()


@dataclass(frozen=True, kw_only=True)
class Views:
    """What the G groups of a forward see. Rows of a group are consecutive, and groups follow each other."""

    query_start_loc: np.ndarray
    """[G + 1] int32, on the host: first row of every group."""
    query_start_loc_on_device: torch.Tensor
    """[G + 1] int32."""
    block_tables: Sequence[torch.Tensor]
    """By K/V cache group of the engine: [G, pages] int32, page ids that every group sees."""
    seq_lens: torch.Tensor
    """[G] int32: K/V length that every group sees, up to the end of its own rows."""
    max_seq_len: int
    """At least the longest of ``seq_lens``."""
    causal: bool | torch.Tensor = False
    """Whether rows of a group see only what is before them: of all groups, or of each ([G] int32)."""


def see_own_pages(
    block_table: torch.Tensor,
    scratch: "ScratchPages",
    *,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    first_page: torch.Tensor,
    end_page: torch.Tensor | None = None,
) -> None:
    """In the block tables of drafts' groups, put the drafts' scratch pages in the place of the requests' pages.

    Args:
        block_table: [G, pages] int32; changes.
        slots: [G] int64.
        drafts: [G] int64: draft of every group, from 0; negative: the group is no draft, and its table stays.
        first_page: [G] int64: index of the page that the draft's first position lies in. The table has columns for as
            many pages from there on as a draft has.
        end_page: [G] int64: index behind the draft's last page; ``None``: nothing is seen behind the scratch pages.
    """
    reach = iota(scratch.pages_per_draft, block_table.device)
    columns = first_page.unsqueeze(1) + reach
    is_own = (drafts >= 0).unsqueeze(1)
    if end_page is not None:
        is_own = is_own & (columns < end_page.unsqueeze(1))
    own = scratch.page(slots.unsqueeze(1), drafts.unsqueeze(1), reach)
    block_table.scatter_(1, columns, torch.where(is_own, own.int(), block_table.gather(1, columns)))


class DeviceViews(NamedTuple):
    """Of ``Views`` what the device decides: the fields of that record, for one K/V cache group."""

    query_start_loc: torch.Tensor
    """[G + 1] int32."""
    seq_lens: torch.Tensor
    """[G] int32."""
    block_table: torch.Tensor
    """[G, pages] int32."""
    causal: bool | torch.Tensor


@dataclass(frozen=True, kw_only=True)
class DeviceBranches:
    """Where the logits of a step's branches are: D requests, up to B branches each, w blocks in a window.

    Branch 0 is the window as it stands, the others are drafts. Logits come in N runs of L rows, one row for each
    position of a block.
    """

    requests: torch.Tensor
    """[N] int64: request of every run."""
    branch: torch.Tensor
    """[N] int64: branch of every run; of padding too, which ``Sight.groups`` does not name."""
    block: torch.Tensor
    """[N] int64: block of the window that every run predicts, from 0."""


@dataclass(frozen=True)
class Sight(PerRequest):
    """What the forward of a step saw of F requests, as the row plan and the request states have it."""

    state: torch.Tensor
    """[F, columns] int64: packed as in ``BlockState``, as of this step's forward."""
    commit_only: torch.Tensor
    """[F] bool: as in ``decoding.records.Window``."""
    first_only: torch.Tensor
    """[F] bool: as in ``decoding.records.Window``."""
    present: torch.Tensor
    """[F, B] bool: the branch exists, and this step computes it."""
    groups: torch.Tensor
    """[F, B, w] int64: run of each block of each branch; some run of the request where ``present`` is false."""
    slots: torch.Tensor
    """[F] int64."""
    predicted_outside: torch.Tensor | None = None
    """[F, W] bool: as in ``decoding.records.Window``."""


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Plan of one step with R requests, of which the first D decode. L: block length."""

    num_decodes: int
    """D."""
    views: Views
    """Of all rows; those of the decoding requests come first."""
    sight: Sight
    """Of the decoding requests."""
    branches: DeviceBranches
    run_requests_np: np.ndarray
    """[N] int64: ``branches.requests``, on the host."""
    logits_rows: torch.Tensor
    """[N * L + P + T] int64: rows whose logits are needed: those of the branches' runs, of ``first_token_requests``, of
    ``guidance``."""
    first_token_requests: np.ndarray
    """[P] int64: with ``commit_predicts``: requests whose prefill yields the first token of their first block."""
    guidance: Guidance | None = None
    """What becomes of the logits before all else, where a request has a ``cfg_scale``."""
