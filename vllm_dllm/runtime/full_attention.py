"""Models with full attention inside vLLM's Model Runner V2."""

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.models.hook import engine_options
from vllm_dllm.runtime.model_state import DllmModelState, num_decodes_of
from vllm_dllm.runtime.plan.block import RowPlan
from vllm_dllm.runtime.plan.extent import Extent
from vllm_dllm.runtime.plan.full import FullLayout, Places, plan_full_attention
from vllm_dllm.runtime.plan.scratch import ScratchPages
from vllm_dllm.runtime.states import BlockState, Field


def extent_of(vllm_config: VllmConfig) -> Extent:
    """What an engine computes of its requests, in any process; the hook leaves the options resolved."""
    hf_config = vllm_config.model_config.hf_config
    options = hf_config.engine_options
    return Extent(options["cache"], hf_config.block_length, options["generation_window"])


def pages_of_a_request(vllm_config: VllmConfig, page_size: int) -> int:
    """K/V pages that a request has at most. Scheduler and workers count alike."""
    model, hf_config = vllm_config.model_config, vllm_config.model_config.hf_config
    longest_text = hf_config.longest_text(model.max_model_len)
    pages = cdiv(longest_text, page_size)
    if engine_options(vllm_config).has_room_for_guidance:
        # A step has room for the text and its twin.
        pages = max(pages, 2 * cdiv(min(longest_text, hf_config.max_rows // 2), page_size))
    return pages


class FullAttentionModelState(DllmModelState):
    """Runs a model whose positions all see each other: K/V of a refresh, and one block being denoised against it.

    vLLM's counter of computed tokens stays at 0 on the device: where a request is follows from the rows that the
    scheduler gives it, and every row's position and slot from the plan.
    """

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.extent = extent_of(vllm_config)
        # By slot: position behind the last block.
        self.text_end_np = np.zeros(self.max_num_reqs, dtype=np.int64)
        self.prompt_length_np = np.zeros(self.max_num_reqs, dtype=np.int64)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        # With the counter at 0, vLLM reads as many tokens of a request as it has rows, before the plan replaces them:
        # drafts and all, beyond the request's own row of this table. There must be something to read behind the last.
        text = sampler.req_states.all_token_ids
        more = cdiv(self.scheduler_config.max_num_batched_tokens, self.max_model_len)
        # In place: vLLM's penalties hold it too.
        StagedWriteTensor.__init__(
            text,
            (self.max_num_reqs + more, self.max_model_len),
            dtype=text.dtype,
            device=self.device,
            max_concurrency=text.max_concurrency,
            uva_instead_of_gpu=hasattr(text, "_uva_buf"),
        )
        return super().custom_sampler(sampler)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        assert params is not None and params.max_tokens is not None and new_req_data.prompt_token_ids is not None
        prompt_length = len(new_req_data.prompt_token_ids)
        self.text_end_np[req_index] = self.extent.text_end(
            prompt_length, min(params.max_tokens, self.max_model_len - prompt_length)
        )
        self.prompt_length_np[req_index] = prompt_length

    def _table_width(self, page_size: int) -> int:
        return max(super()._table_width(page_size), pages_of_a_request(self.vllm_config, page_size))

    def _plan(self, batch: InputBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> RowPlan:
        assert self.page_size is not None
        num_decodes = num_decodes_of(batch)
        slots_np = batch.idx_mapping_np[:num_decodes]
        slots = batch.idx_mapping[:num_decodes].long()
        places = Places.of(
            batch,
            num_decodes,
            self.extent,
            page_size=self.page_size,
            text_end=self.text_end_np[slots_np],
            prompt_length=self.prompt_length_np[slots_np],
            cfg_scale=self.states.cfg_scale_np[slots_np],
        )
        state = self.states.gather(slots)
        if self.scratch is not None and self.extent.cache != "none" and (self.states.num_drafts_np[slots_np] > 0).any():
            state = self._with_rest_of_pages(state, slots, places, block_table, self.scratch)
        # A dummy step has no requests, and comes before there is a sampler.
        text = slots.new_zeros(1, 1) if self.req_states is None else self.req_states.all_token_ids.gpu
        return plan_full_attention(
            batch,
            state,
            FullLayout(
                extent=self.extent,
                page_size=self.page_size,
                limit=self.longest_text,
                shifted=self.traits.shifted,
                mask_token_id=self.states.mask_token_id,
                scratch=self.scratch,
            ),
            places,
            slots=slots,
            text=text,
            block_table=block_table,
            slot_mapping=slot_mapping,
        )

    def _with_rest_of_pages(
        self, state: BlockState, slots: torch.Tensor, places: Places, block_table: torch.Tensor, scratch: ScratchPages
    ) -> BlockState:
        """After a refresh, before the first drafts: give their pages what stands beside the block in its own.

        It stays as it is until the next refresh.
        """
        device = slots.device
        host = np.stack((places.block_start, places.window_end, places.refresh)).astype(np.int64)
        block_start, window_end, refresh = async_tensor_h2d(host, device=device).unbind()
        fields = state.fields.clone()
        due = (fields[:, Field.NUM_DRAFTS] > 0) & (fields[:, Field.HEADS] == 0) & (refresh == 0)
        drafts = torch.arange(scratch.max_drafts, device=device)
        wanted = due.unsqueeze(1) & (drafts < fields[:, Field.MAX_DRAFTS].unsqueeze(1))
        span = self.extent.branch(block_start, window_end)
        scratch.copy_rest(slots, span.start, span.end, block_table[: len(slots)], wanted)
        fields[:, Field.HEADS] = torch.where(refresh.bool(), 0, fields[:, Field.HEADS] | due)
        return state._replace(fields=fields)
