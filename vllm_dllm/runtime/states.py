"""What the runtime remembers of every request between steps, on the device."""

import dataclasses
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import NamedTuple

import numpy as np
import torch

from vllm_dllm.decoding.policies import DRAWN_POLICIES, TIMED_POLICIES, timestep_ratios
from vllm_dllm.decoding.records import Progress
from vllm_dllm.decoding.verifiers import Verifier
from vllm_dllm.options.resolve import ResolvedOptions


class Field(IntEnum):
    """Columns of a request's fields in ``DenoiseStates.rows``: what it asked for, then its ``Progress`` by name."""

    POLICY = 0
    QUOTA = auto()
    QUOTA_REMAINDER = auto()
    MAX_POST_STEPS = auto()
    RADIUS = auto()
    VERIFIER = auto()
    MAX_DRAFTS = auto()
    """Drafts beside the block itself that this request asked for."""
    SCHEDULE = auto()
    """Where the request's timesteps begin in ``DenoiseStates.schedules``; -1: its policy has none."""
    NUM_STEPS = auto()
    """How many timesteps the request has."""
    WINDOW = auto()
    """Positions that a round of FeF drafts."""
    NUM_PASSES = auto()
    """Passes of FeF over a block."""
    BLOCK_START = auto()
    FIRST = auto()
    STEP = auto()
    POST_STEPS = auto()
    COMMIT = auto()
    NUM_DRAFTS = auto()
    PREFIX_COPIED = auto()
    PENDING = auto()
    PASSES = auto()


NUM_FIELDS = len(Field)
PROGRESS = [Field[field.name.upper()] for field in dataclasses.fields(Progress)]
"""Columns of a ``Progress``, which a step changes."""
assert list(range(PROGRESS[0], NUM_FIELDS)) == PROGRESS, "the last columns are those of a Progress, in its order"

BOUNDS = ("threshold", "entropy_bound", "edit_threshold", "relaxed_threshold", "factor", "alg_temp", "remask")
"""Options that ``DenoiseStates.bounds`` has as columns."""

MAX_STOP_TOKEN_IDS = 128
"""As many as vLLM itself takes per request."""


class BlockState(NamedTuple):
    """State of the decoding requests of a step, gathered in one go. D requests, blocks of L positions.

    What is denoised is a window of W positions: a block, or several where drafts reach into later ones (``eager``).
    """

    fields: torch.Tensor
    """[D, NUM_FIELDS] int64."""
    levels: torch.Tensor
    """[D, max_drafts] int64: denoising steps that each draft is ahead of the block."""
    finished: torch.Tensor
    """[D, L] int64: the block before the window, where ``Field.COMMIT`` is set."""
    branches: torch.Tensor
    """[D, (1 + max_drafts) * W] int64: the window as it stands, with mask tokens, then its drafts."""

    @property
    def progress(self) -> Progress:
        """Where each request stands."""
        return Progress(*self.fields[:, PROGRESS[0] :].unbind(1))


class DenoiseStates:
    """Per-request state by slot (vLLM's index of a request in the worker, below ``max_num_reqs``).

    A slot's row is written whole when a request enters it, so nothing of the request before can remain, whether that
    one finished, was aborted or preempted.
    """

    def __init__(
        self,
        max_num_reqs: int,
        block_length: int,
        mask_token_id: int,
        device: torch.device,
        *,
        max_drafts: int = 0,
        window_blocks: int = 1,
        host_follows: bool = False,
    ):
        """Room for ``max_num_reqs`` requests.

        Args:
            host_follows: each step is planned after the host has seen the one before, so it may know of every request
                whether that made drafts. Not so under async scheduling.
        """
        # Here, so that plans and their tests, which read the records above, do without vLLM.
        from vllm.utils.platform_utils import is_pin_memory_available
        from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

        self.block_length = block_length
        self.window_length = window_blocks * block_length
        self.max_drafts = max_drafts
        self.mask_token_id = mask_token_id
        self.device = device
        # Columns of fields, finished block, branches and levels.
        self.sizes = NUM_FIELDS, block_length, (1 + max_drafts) * self.window_length, max_drafts
        # [max_num_reqs, ...]: the parts of a BlockState.
        self.rows = StagedWriteTensor((max_num_reqs, sum(self.sizes)), dtype=torch.int64, device=device)
        # [max_num_reqs, len(BOUNDS)].
        self.bounds = UvaBackedTensor((max_num_reqs, len(BOUNDS)), dtype=torch.float32)
        # Shares of the masked positions that each step of a schedule unmasks; all schedules in use, end to end.
        self.schedules = torch.ones(1, dtype=torch.float32, device=device)
        self._schedule_of: dict[int, int] = {}
        # [max_num_reqs, MAX_STOP_TOKEN_IDS], padded with -1.
        self.stop_token_ids = StagedWriteTensor((max_num_reqs, MAX_STOP_TOKEN_IDS), dtype=torch.int32, device=device)
        # Host copies of what never changes while a request lives: they let a step skip what no request of it uses.
        self.generation = 0
        """Counts the requests that entered: while it stays, what is known of a slot's options holds."""
        self.policy_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.editing_np = np.zeros(max_num_reqs, dtype=bool)
        self.num_stop_token_ids_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.verifier_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_drafts_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.uses_graph_np = np.zeros(max_num_reqs, dtype=bool)
        self.auto_drafts_np = np.zeros(max_num_reqs, dtype=bool)
        self.draws_positions_np = np.zeros(max_num_reqs, dtype=bool)
        self.cfg_scale_np = np.zeros(max_num_reqs)
        # [max_num_reqs], on the host: drafts that the last step made.
        self._drafts_made: torch.Tensor | None = None
        self._drafts_copied: torch.Event | None = None
        if host_follows and max_drafts:
            self._drafts_made = torch.zeros(max_num_reqs, dtype=torch.int64, pin_memory=is_pin_memory_available())
            self._drafts_copied = torch.Event(device) if device.type != "cpu" else None

    def add_request(
        self,
        slot: int,
        token_ids: Sequence[int],
        options: ResolvedOptions,
        stop_token_ids: Sequence[int],
        *,
        grid_start: int = 0,
        uses_graph: bool = False,
    ) -> None:
        """Start (or resume) a request whose known tokens, prompt and output, are ``token_ids``.

        The tail of them that does not fill a block stays fixed at the head of the first block to denoise.

        Args:
            grid_start: position that blocks are counted from.
            uses_graph: its drafts come from the engine's draft graph, not from a chain.
        """
        self.generation += 1
        block_start = len(token_ids) - (len(token_ids) - grid_start) % self.block_length
        tail = list(token_ids[block_start:])
        verifier = _verifier(options)
        num_drafts = options.num_drafts if verifier != Verifier.NONE else 0
        fields = [0] * NUM_FIELDS
        fields[Field.BLOCK_START] = block_start
        fields[Field.FIRST] = len(tail)
        fields[Field.POLICY] = options.kind
        fields[Field.QUOTA] = options.quota
        fields[Field.QUOTA_REMAINDER] = options.quota_remainder
        fields[Field.MAX_POST_STEPS] = options.max_post_edit_steps
        fields[Field.RADIUS] = options.radius
        fields[Field.VERIFIER] = verifier
        fields[Field.MAX_DRAFTS] = num_drafts
        fields[Field.SCHEDULE] = self._schedule(options.num_steps) if options.kind in TIMED_POLICIES else -1
        fields[Field.NUM_STEPS] = options.num_steps
        fields[Field.WINDOW] = options.window
        fields[Field.NUM_PASSES] = options.resample_steps
        _, num_finished, num_tokens, num_levels = self.sizes
        masks = [self.mask_token_id] * (num_tokens - len(tail))
        self.rows.stage_write(slot, 0, fields + [0] * num_finished + tail + masks + [0] * num_levels)
        self.bounds.np[slot] = [getattr(options, name) for name in BOUNDS]
        stop_token_ids = list(stop_token_ids)[:MAX_STOP_TOKEN_IDS] if options.eos_early_stop else []
        padding = [-1] * (MAX_STOP_TOKEN_IDS - len(stop_token_ids))
        self.stop_token_ids.stage_write(slot, 0, stop_token_ids + padding)
        self.policy_np[slot] = options.kind
        self.editing_np[slot] = options.edit_threshold != float("inf")
        self.num_stop_token_ids_np[slot] = len(stop_token_ids)
        self.verifier_np[slot] = verifier
        self.num_drafts_np[slot] = num_drafts
        self.uses_graph_np[slot] = uses_graph
        self.auto_drafts_np[slot] = options.auto_drafts
        self.draws_positions_np[slot] = options.kind in DRAWN_POLICIES or options.alg_temp > 0
        self.cfg_scale_np[slot] = options.cfg_scale
        if self._drafts_made is not None:
            self._wait_for_drafts_made()
            self._drafts_made[slot] = 0

    def _schedule(self, num_steps: int) -> int:
        """Where the schedule of so many timesteps begins in ``schedules``."""
        if num_steps not in self._schedule_of:
            self._schedule_of[num_steps] = len(self.schedules)
            ratios = timestep_ratios(num_steps).to(self.device)
            self.schedules = torch.cat((self.schedules, ratios))
        return self._schedule_of[num_steps]

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` staged to the device; once per step with new requests, before the forward."""
        self.rows.apply_write()
        self.bounds.copy_to_uva()
        self.stop_token_ids.apply_write()

    def gather(self, slots: torch.Tensor) -> BlockState:
        """State of the requests in ``slots`` [D]."""
        fields, finished, branches, levels = self.rows.gpu[slots].split(self.sizes, dim=1)
        return BlockState(fields, levels, finished, branches)

    def put(
        self,
        slots: torch.Tensor,
        progress: Progress,
        finished: torch.Tensor,
        window: torch.Tensor,
        drafts: Sequence[torch.Tensor] = (),
    ) -> None:
        """Write what the requests in ``slots`` [D] go on from.

        Args:
            finished, window: [D, L] and [D, W] int64.
            drafts: [D, max_drafts * W] int64, the tokens of drafts, and [D, max_drafts] int64, their levels. The stored
                ones stay where they are left out.
        """
        changed = torch.stack([getattr(progress, field.name) for field in dataclasses.fields(progress)], dim=1)
        values = torch.cat((changed, finished, window, *drafts), dim=1)
        self.rows.gpu[:, PROGRESS[0] : PROGRESS[0] + values.shape[1]].index_copy_(0, slots, values)

    def put_first_token(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the tokens [P] that prefills predict for the first positions of the windows of ``slots`` [P]."""
        self.rows.gpu[slots, self.sizes[0] + self.sizes[1]] = tokens

    def copy_draft_counts(self) -> None:
        """Once per step, when its drafts are in ``rows``: copy their numbers to the host, where the host may ask."""
        if self._drafts_made is not None:
            self._drafts_made.copy_(self.rows.gpu[:, Field.NUM_DRAFTS], non_blocking=True)
            if self._drafts_copied is not None:
                self._drafts_copied.record()

    def may_have_drafts(self, slots_np: np.ndarray) -> np.ndarray:
        """[D] bool: which requests may have drafts in the step that is being planned, as far as the host knows.

        A request that writes a finished block has as many rows as one with a draft, but none for logits.
        """
        drafting = self.num_drafts_np[slots_np] > 0
        if self._drafts_made is not None and drafting.any():
            self._wait_for_drafts_made()
            drafting &= self._drafts_made.numpy()[slots_np] > 0
        return drafting

    def _wait_for_drafts_made(self) -> None:
        # The engine has seen the step before, but of one rank only; all ranks must plan the same.
        if self._drafts_copied is not None:
            self._drafts_copied.synchronize()


def _verifier(options: ResolvedOptions) -> Verifier:
    if options.verify == "fef":
        # Without drafts it goes on one position at a time.
        return Verifier.FEF
    if options.verify == "none" or options.num_drafts == 0:
        return Verifier.NONE
    if options.verify == "psd":
        return Verifier.PSD
    return Verifier.SUBSET if options.subset_match else Verifier.EXACT
