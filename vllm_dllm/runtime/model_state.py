"""Block diffusion inside vLLM's Model Runner V2: row plan, attention metadata, sampler."""

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_dllm.config import parse_request_options, resolve
from vllm_dllm.models.hook import engine_options
from vllm_dllm.models.traits import FamilyTraits
from vllm_dllm.runtime.row_plan import RowPlan, plan_rows
from vllm_dllm.runtime.sampler import BlockDiffusionSampler
from vllm_dllm.runtime.states import DenoiseStates


class BlockDiffusionModelState(ModelState):
    """Runs a model with block-causal attention: finished blocks in the K/V cache, one block being denoised."""

    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        hf_config = self.model_config.hf_config
        self.traits: FamilyTraits = hf_config.traits
        self.options = engine_options(vllm_config)
        self.block_length: int = hf_config.block_length
        self.states = DenoiseStates(self.max_num_reqs, self.block_length, hf_config.mask_token_id, device)
        self.plan: RowPlan | None = None
        self.page_size = 0

    # Requests come and go. Leaving takes no work: the next request overwrites the slot.

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        params = new_req_data.sampling_params
        assert params is not None and new_req_data.prefill_token_ids is not None
        options = resolve(parse_request_options(params.extra_args), self.options, self.traits, self.block_length)
        # Those that vLLM's scheduler stops at: `all_stop_token_ids` has the ignored ones too, for min_tokens.
        stop_token_ids = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        self.states.add_request(req_index, new_req_data.prefill_token_ids, options, sorted(stop_token_ids))

    def apply_staged_writes(self) -> None:
        self.states.apply_staged_writes()

    # Start-up.

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: BlockTables) -> None:
        if block_tables.num_kv_cache_groups != 1:
            raise ValueError(
                f"{self.traits.family} needs one kind of K/V cache for all layers, but the model has "
                f"{block_tables.num_kv_cache_groups}"
            )
        self.page_size = block_tables.block_sizes[0]
        # vLLM computes slots for all rows of a request before the plan replaces them. Those of the last block may lie
        # beyond max_model_len, and the look-up must not leave the request's row of the table.
        width = cdiv(self.max_model_len + self.model_config.hf_config.canvas_length, self.page_size)
        table = block_tables.block_tables[0]
        if table.gpu.shape[1] < width:
            table = StagedWriteTensor((self.max_num_reqs, width), dtype=torch.int32, device=self.device)
            block_tables.block_tables[0] = table
            block_tables.input_block_tables[0] = torch.zeros_like(table.gpu)
            block_tables.init_block_table_layout_tensors()

    def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
        # The number of attention groups differs from the number of requests and changes from step to step, so
        # attention stays outside of the CUDA graphs (piecewise graphs).
        return AttentionCGSupport.NEVER, "block-diffusion row plan"

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        return BlockDiffusionSampler(self, sampler), None

    # Every step.

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        num_decodes = _num_decodes(input_batch)
        plan = plan_rows(
            input_batch,
            self.states.gather(input_batch.idx_mapping[:num_decodes]),
            num_decodes=num_decodes,
            block_length=self.block_length,
            shifted=self.traits.shifted,
            page_size=self.page_size,
            block_table=block_tables[0],
            slot_mapping=slot_mappings[0],
        )
        self.plan = plan
        # The runner takes the hidden states of these rows, and only these, to the logits.
        input_batch.logits_indices = plan.logits_rows
        table = block_tables[0]
        return build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=plan.num_groups,
            num_tokens=input_batch.num_tokens,
            query_start_loc_gpu=async_tensor_h2d(plan.query_start_loc, device=self.device),
            query_start_loc_cpu=torch.from_numpy(plan.query_start_loc),
            max_query_len=plan.max_query_len,
            seq_lens=plan.seq_lens,
            max_seq_len=int(input_batch.seq_lens_cpu_upper_bound.max()) + self.block_length,
            block_tables=[table if plan.group_requests is None else table[plan.group_requests]],
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            causal=False,
        )

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        if self.page_size == 0 and self.device.type != "cpu":
            # vLLM measures its memory before there is a K/V cache, with one row of logits per request. We need a block.
            num_rows = min(input_batch.num_tokens, self.max_num_reqs * self.block_length)
            input_batch.logits_indices = torch.arange(num_rows, device=self.device)
        return {}

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> torch.Tensor | None:
        return None

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}


def _num_decodes(batch: InputBatch) -> int:
    """Requests of the batch that decode. vLLM puts those with draft rows first."""
    if batch.num_draft_tokens == 0:
        return 0
    assert batch.num_draft_tokens_per_req is not None
    num_decodes = int(np.count_nonzero(batch.num_draft_tokens_per_req))
    assert (batch.num_draft_tokens_per_req[:num_decodes] > 0).all()
    return num_decodes
