"""Step maps: which denoising step and which forward wrote each token, kept until the token's block is emitted.

Step events tell the same of tokens that are not emitted yet, and the tokens themselves.
"""

import numpy as np
import torch
from torch import Tensor

from vllm_dllm.decoding.records import Rules, move
from vllm_dllm.observe.wires import AGE, MASKED, STEP, STEP_MAP_COLUMNS, TOKEN

_NOT_WRITTEN = 1 << 30


class StepMaps:
    """For every position of a request's window: what ``vllm_dllm.observe.wires.take_step_maps`` gives the scheduler.

    A step none of whose requests asked for its step map or for step events does no work here.
    """

    def __init__(self, max_num_reqs: int, rules: Rules, device: torch.device):
        self.rules = rules
        self.wanted_np = np.zeros(max_num_reqs, dtype=bool)
        # [max_num_reqs, W, columns].
        self.kept = torch.zeros(max_num_reqs, len(rules.columns), STEP_MAP_COLUMNS, dtype=torch.int64, device=device)

    def add_request(self, slot: int, wanted: bool) -> None:
        """Take whether the request in ``slot`` wants its step map or step events."""
        self.wanted_np[slot] = wanted
        if wanted:
            self.kept[slot] = _NOT_WRITTEN

    def wanted(self, slots_np: np.ndarray) -> bool:
        """Whether any of the requests wants its step map or step events."""
        return bool(self.wanted_np[slots_np].any())

    def note(self, slots: Tensor, tokens: Tensor, written: Tensor, step: Tensor) -> None:
        """Keep what this forward says of the first K positions of each window.

        Args:
            slots: [D] int64.
            tokens: [D, K] int64: the positions after the forward.
            written: [D, K] bool: positions that the forward gave a token.
            step: [D, K] int64: the denoising step of each position's token, as ``decoding.step.Origin`` has it.
        """
        kept = self.kept[slots]
        width = written.shape[1]
        # Of the steps that a forward stands for, the last is the policy's, and those before it are accepted drafts.
        last = step.masked_fill(~written, -1).amax(dim=1, keepdim=True)
        # A further pass of FeF masks positions again.
        tokens = torch.where(tokens == self.rules.mask_id, MASKED, tokens)
        # The columns STEP, AGE, TOKEN and OF_DRAFT.
        fresh = torch.stack((step, torch.zeros_like(step), tokens, (step < last).long()), dim=2)
        is_fresh = written.unsqueeze(2) | (torch.arange(STEP_MAP_COLUMNS, device=slots.device) == TOKEN)
        kept.select(2, AGE).add_(1)
        kept = torch.cat((torch.where(is_fresh, fresh, kept[:, :width]), kept[:, width:]), dim=1)
        # An assignment to `self.kept[slots]`, or to a part of `kept`, would ask whether there is one request.
        self.kept.index_copy_(0, slots, kept)

    def of_window(self, slots: Tensor) -> Tensor:
        """[D, W, columns] int64: of the requests in ``slots`` [D], with steps counted from 0 in each block."""
        kept = self.kept[slots]
        if self.rules.window_blocks > 1:
            # Steps of such a window are counted through. Each step of a block writes a token in it.
            steps = kept[:, :, STEP].view(len(kept), self.rules.window_blocks, -1)
            kept[:, :, STEP] = (steps - steps.amin(dim=2, keepdim=True)).flatten(1)
        return kept

    def move(self, slots: Tensor, shift: Tensor) -> None:
        """Let what is kept of ``slots`` [D] follow their windows, ``shift`` [D] columns."""
        self.kept[slots] = move(self.kept[slots], shift, _NOT_WRITTEN)
