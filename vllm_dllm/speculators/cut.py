"""Drafts whose number the device alone knows, of which vLLM has no count.

FailFast decides on the device how many of a request's k drafts are verified. The worker marks the drafts behind that
number as invalid, as vLLM marks drafts that a grammar forbids, and the rejection sampler rejects invalid drafts. With
synchronous scheduling these drafts are also removed before the next step is scheduled:

==================  ==============================  ==============================================
scheduling          rows of the target              the scheduler learns the number of drafts
==================  ==============================  ==============================================
synchronous         those of the drafts             before it schedules their verification
asynchronous        k, some of them for nothing     with the tokens that their verification gives
==================  ==============================  ==============================================
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

from vllm_dllm.patches.original import of_vllm

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

NUM_DRAFTS = "dllm_num_drafts"
"""Attribute of vLLM's states of requests: [max_num_reqs] int64 by slot, how many drafts of each are to be verified."""


def counts_of_requests(is_draft: torch.Tensor, nans: torch.Tensor | None, bounds: torch.Tensor) -> torch.Tensor:
    """The integer of each request that vLLM copies beside the tokens, [R] int32; see `take_proposed`.

    Args:
        is_draft: [rows] bool: the row reads a draft that is verified. The first that is not ends a request's drafts.
        nans: [rows] NaNs of the rows' logits, which come first where there are any; None: they are not counted.
        bounds: [R + 1] int64: where the rows of the requests begin and end.
    """

    def of_requests(values: torch.Tensor) -> torch.Tensor:
        ends = torch.nn.functional.pad(values.cumsum(0), (1, 0))
        return (ends[bounds[1:]] - ends[bounds[:-1]]).int()

    proposed = -1 - of_requests(is_draft)
    if nans is None:
        return proposed
    nans = of_requests(nans)
    return torch.where(nans > 0, nans, proposed)


@functools.cache
def cut_drafts() -> None:
    """Have vLLM's rejection sampler and runner know `NUM_DRAFTS`, in this process; engines without it are as before."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    parameters = ("self", "logits", "input_batch", "draft_logits", "invalid_drafts")
    verify = of_vllm(RejectionSampler, "__call__", parameters)
    take = of_vllm(GPUModelRunner, "take_draft_token_ids", ("self",))

    @functools.wraps(verify)
    def verify_cut(
        self: Any,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> "SamplerOutput":
        number = getattr(self.sampler.req_states, NUM_DRAFTS, None)
        if number is None:
            return verify(self, logits, input_batch, draft_logits, invalid_drafts)
        # Row i of a request reads draft i, counted from 1; row 0 reads the token before the drafts.
        place = input_batch.expanded_local_pos
        is_cut = place > number[input_batch.expanded_idx_mapping.long()]
        if invalid_drafts is not None:
            is_cut |= invalid_drafts
        output = verify(self, logits, input_batch, draft_logits, is_cut)
        output.num_nans = counts_of_requests((place > 0) & ~is_cut, output.num_nans, input_batch.cu_num_logits.long())
        return output

    @functools.wraps(take)
    def take_cut(self: Any) -> "DraftTokenIds | None":
        drafts = take(self)
        in_round = getattr(self.speculator, "in_round", None)
        if drafts is not None and in_round is not None:
            for tokens, number in zip(drafts.draft_token_ids, in_round.tolist(), strict=True):
                del tokens[number:]
        return drafts

    RejectionSampler.__call__ = verify_cut
    GPUModelRunner.take_draft_token_ids = take_cut
