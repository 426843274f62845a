"""What the runtime remembers of every request between steps, on the device."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

from vllm_dllm.config import ResolvedOptions
from vllm_dllm.decoding.policies import Policy


class Field(IntEnum):
    """Columns of a request's row in ``DenoiseStates.rows``; the tokens of its two blocks follow them.

    Those that a step changes come first.
    """

    BLOCK_START = 0
    """Absolute position of the current block."""
    FIRST = 1
    """Offset in the current block of the first token that this request generates: after the prompt's tail."""
    STEP = 2
    """Denoising steps the current block has had."""
    POST_STEPS = 3
    """Denoising steps the current block has had since nothing is masked in it (token editing)."""
    COMMIT = 4
    """1 while the block before the current one is finished and its K/V is not in the cache yet."""
    POLICY = 5
    QUOTA = 6
    QUOTA_REMAINDER = 7
    MAX_POST_STEPS = 8
    EOS_EARLY_STOP = 9


NUM_FIELDS = len(Field)

THRESHOLD, ENTROPY_BOUND, EDIT_THRESHOLD = range(3)
"""Columns of ``DenoiseStates.bounds``."""

MAX_STOP_TOKEN_IDS = 128
"""As many as vLLM itself takes per request."""


class BlockState(NamedTuple):
    """State of the decoding requests of a step, gathered in one go. D requests, blocks of L positions."""

    fields: torch.Tensor
    """[D, NUM_FIELDS] int64."""
    tokens: torch.Tensor
    """[D, L] int64: the current block, with mask tokens."""
    finished: torch.Tensor
    """[D, L] int64: the block before it, where ``Field.COMMIT`` is set."""


class DenoiseStates:
    """Per-request state by slot (vLLM's index of a request in the worker, below ``max_num_reqs``).

    A slot's row is written whole when a request enters it, so nothing of the request before can remain, whether that
    one finished, was aborted or preempted.
    """

    def __init__(self, max_num_reqs: int, block_length: int, mask_token_id: int, device: torch.device):
        self.block_length = block_length
        self.mask_token_id = mask_token_id
        self.device = device
        # [max_num_reqs, NUM_FIELDS + 2 * block_length]: fields, current block, finished block.
        self.rows = StagedWriteTensor((max_num_reqs, NUM_FIELDS + 2 * block_length), dtype=torch.int64, device=device)
        # [max_num_reqs, 3]: threshold, entropy bound, edit threshold.
        self.bounds = UvaBackedTensor((max_num_reqs, 3), dtype=torch.float32)
        # [max_num_reqs, MAX_STOP_TOKEN_IDS], padded with -1.
        self.stop_token_ids = StagedWriteTensor((max_num_reqs, MAX_STOP_TOKEN_IDS), dtype=torch.int32, device=device)
        # Host copies of what never changes while a request lives: they let a step skip what no request of it uses.
        self.policy_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.editing_np = np.zeros(max_num_reqs, dtype=bool)
        self.num_stop_token_ids_np = np.zeros(max_num_reqs, dtype=np.int32)

    def add_request(
        self, slot: int, token_ids: Sequence[int], options: ResolvedOptions, stop_token_ids: Sequence[int]
    ) -> None:
        """Start (or resume) a request whose known tokens, prompt and output, are ``token_ids``.

        The tail of them that does not fill a block stays fixed at the head of the first block to denoise.
        """
        length, mask = self.block_length, self.mask_token_id
        block_start = len(token_ids) // length * length
        tail = list(token_ids[block_start:])
        policy = Policy[options.policy.upper()]
        fields = [0] * NUM_FIELDS
        fields[Field.BLOCK_START] = block_start
        fields[Field.FIRST] = len(tail)
        fields[Field.POLICY] = policy
        fields[Field.QUOTA] = options.quota
        fields[Field.QUOTA_REMAINDER] = options.quota_remainder
        fields[Field.MAX_POST_STEPS] = options.max_post_edit_steps
        fields[Field.EOS_EARLY_STOP] = options.eos_early_stop
        self.rows.stage_write(slot, 0, fields + tail + [mask] * (2 * length - len(tail)))
        self.bounds.np[slot] = options.threshold, options.entropy_bound, options.edit_threshold
        stop_token_ids = list(stop_token_ids)[:MAX_STOP_TOKEN_IDS] if options.eos_early_stop else []
        padding = [-1] * (MAX_STOP_TOKEN_IDS - len(stop_token_ids))
        self.stop_token_ids.stage_write(slot, 0, stop_token_ids + padding)
        self.policy_np[slot] = policy
        self.editing_np[slot] = options.edit_threshold != float("inf")
        self.num_stop_token_ids_np[slot] = len(stop_token_ids)

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` staged to the device; once per step with new requests, before the forward."""
        self.rows.apply_write()
        self.bounds.copy_to_uva()
        self.stop_token_ids.apply_write()

    def gather(self, slots: torch.Tensor) -> BlockState:
        """State of the requests in ``slots`` [D]."""
        rows = self.rows.gpu[slots]
        return BlockState(*rows.split((NUM_FIELDS, self.block_length, self.block_length), dim=1))

    def scatter(self, slots: torch.Tensor, state: BlockState) -> None:
        """Write back the state of the requests in ``slots`` [D]."""
        self.rows.gpu[slots] = torch.cat(state, dim=1)
