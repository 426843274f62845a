"""Diffusion inside vLLM's Model Runner V2: row plan, attention metadata, sampler."""

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

from vllm_dllm.kernels.page_copy import PageCopy
from vllm_dllm.models.hook import draft_graph_of, engine_options
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.schema import parse_request_options
from vllm_dllm.runtime.plan.block import Layout, RowPlan, plan_rows
from vllm_dllm.runtime.plan.scratch import ScratchPages, pages_of_a_draft, scratch_pages_of
from vllm_dllm.runtime.sampler import BlockDiffusionSampler
from vllm_dllm.runtime.states import BlockState, DenoiseStates, Field
from vllm_dllm.traits import FamilyTraits


class DllmModelState(ModelState):
    """What models of any attention share: state of the requests, sampler, attention over the groups of a plan."""

    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        hf_config = self.model_config.hf_config
        self.traits: FamilyTraits = hf_config.traits
        self.options = engine_options(vllm_config)
        self.block_length: int = hf_config.block_length
        self.longest_text: int = hf_config.longest_text(self.max_model_len)
        self.draft_graph = draft_graph_of(self.options, hf_config)
        self.states = DenoiseStates(
            self.max_num_reqs,
            self.block_length,
            hf_config.mask_token_id,
            device,
            max_drafts=hf_config.max_drafts,
            window_blocks=hf_config.window_blocks,
            host_follows=not vllm_config.scheduler_config.async_scheduling,
        )
        self.plan: RowPlan | None = None
        self.page_size: int | None = None
        self.scratch: ScratchPages | None = None
        self.req_states: RequestState | None = None

    # Requests come and go. Leaving takes no work: the next request overwrites the slot.

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        params = new_req_data.sampling_params
        assert params is not None and new_req_data.prefill_token_ids is not None
        options = resolve(
            parse_request_options(params.extra_args), self.options, self.traits, self.block_length, params.max_tokens
        )
        # Those that vLLM's scheduler stops at: `all_stop_token_ids` has the ignored ones too, for min_tokens.
        stop_token_ids = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        self.states.add_request(
            req_index,
            new_req_data.prefill_token_ids,
            options,
            sorted(stop_token_ids),
            grid_start=self._grid_start(new_req_data),
            # PSD drafts a chain unless the user gives a graph; Spiffy is nothing without one.
            uses_graph=options.verify == "spiffy" or (options.verify == "psd" and self.options.draft_graph is not None),
        )

    def _grid_start(self, new_req_data: NewRequestData) -> int:
        """Position that the blocks of a request are counted from."""
        assert new_req_data.prompt_token_ids is not None
        return 0 if self.traits.attention == "block-causal" else len(new_req_data.prompt_token_ids)

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
        if self.states.max_drafts:
            self.scratch = self._scratch_pages(kv_cache_config, self.page_size)
        width = self._table_width(self.page_size)
        if block_tables.block_tables[0].gpu.shape[1] < width:
            table = StagedWriteTensor((self.max_num_reqs, width), dtype=torch.int32, device=self.device)
            block_tables.block_tables[0] = table
            block_tables.input_block_tables[0] = torch.zeros_like(table.gpu)
            block_tables.init_block_table_layout_tensors()

    def _table_width(self, page_size: int) -> int:
        """Pages that a request's row of the block table must have room for."""
        # vLLM computes slots for all rows of a request before the plan replaces them. Those of the last block may lie
        # beyond max_model_len, and the look-up must not leave the request's row of the table.
        width = cdiv(self.max_model_len + self.model_config.hf_config.canvas_length, page_size)
        # Nor must the pages that a draft's window may touch.
        return width + (0 if self.scratch is None else self.scratch.pages_per_draft)

    def _scratch_pages(self, kv_cache_config: KVCacheConfig, page_size: int) -> ScratchPages:
        num_pages = kv_cache_config.num_blocks
        layers = self.vllm_config.compilation_config.static_forward_context
        names = kv_cache_config.kv_cache_groups[0].layer_names
        # A kernel may split the pages of the tables; dimension 0 counts its own.
        caches = [layers[name].kv_cache.unflatten(0, (num_pages, -1)) for name in names]
        return ScratchPages(
            # The scheduler hands out the pages below.
            first_page=num_pages - scratch_pages_of(self.vllm_config, page_size),
            max_drafts=self.states.max_drafts,
            pages_per_draft=pages_of_a_draft(self.vllm_config, page_size),
            page_size=page_size,
            copy=PageCopy(caches),
        )

    def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
        # The number of attention groups differs from the number of requests and changes from step to step, so
        # attention stays outside of the CUDA graphs (piecewise graphs).
        return AttentionCGSupport.NEVER, "block-diffusion row plan"

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        self.req_states = sampler.req_states
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
        plan = self._plan(input_batch, block_tables[0], slot_mappings[0])
        self.plan = plan
        # The runner takes the hidden states of these rows, and only these, to the logits.
        input_batch.logits_indices = plan.logits_rows
        return build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=plan.num_groups,
            num_tokens=input_batch.num_tokens,
            query_start_loc_gpu=async_tensor_h2d(plan.query_start_loc, device=self.device),
            query_start_loc_cpu=torch.from_numpy(plan.query_start_loc),
            max_query_len=plan.max_query_len,
            seq_lens=plan.seq_lens,
            max_seq_len=plan.max_seq_len,
            block_tables=[plan.block_table],
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            causal=plan.causal,
        )

    def _plan(self, batch: InputBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> RowPlan:
        """What every row of the step is. ``block_table`` [R, pages], ``slot_mapping`` [rows], which changes."""
        raise NotImplementedError

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        if self.page_size is None and self.device.type != "cpu":
            # vLLM measures its memory before there is a K/V cache, with one row of logits per request. A step may have
            # those of a block and of all its drafts.
            num_branches = 1 + max(self.states.max_drafts, self.options.has_room_for_guidance)
            num_rows = min(input_batch.num_tokens, self.max_num_reqs * num_branches * self.states.window_length)
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


class BlockDiffusionModelState(DllmModelState):
    """Runs a model whose blocks do not see what is after them: finished blocks in the K/V cache, one being denoised."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.causal_context = self.traits.attention == "causal-context"
        # By slot: position that blocks are counted from.
        self.grid_start_np = np.zeros(self.max_num_reqs, dtype=np.int64)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        self.grid_start_np[req_index] = self._grid_start(new_req_data)

    def _plan(self, batch: InputBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> RowPlan:
        assert self.page_size is not None
        num_decodes = num_decodes_of(batch)
        slots = batch.idx_mapping[:num_decodes].long()
        drafting = self.states.may_have_drafts(batch.idx_mapping_np[:num_decodes])
        state = self.states.gather(slots)
        if self.scratch is not None and drafting.any():
            state = _with_heads(state, slots, block_table, self.scratch)
        layout = Layout(
            block_length=self.block_length,
            window_blocks=self.states.window_length // self.block_length,
            page_size=self.page_size,
            limit=self.longest_text,
            shifted=self.traits.shifted,
            causal_context=self.causal_context,
            scratch=self.scratch,
        )
        return plan_rows(
            batch,
            state,
            layout,
            num_decodes=num_decodes,
            drafting_np=drafting,
            grid_start_np=self.grid_start_np[batch.idx_mapping_np[: batch.num_reqs]],
            slots=slots,
            block_table=block_table,
            slot_mapping=slot_mapping,
        )


def num_decodes_of(batch: InputBatch) -> int:
    """Requests of the batch that decode. vLLM puts those with draft rows first."""
    if batch.num_draft_tokens == 0:
        return 0
    assert batch.num_draft_tokens_per_req is not None
    num_decodes = int(np.count_nonzero(batch.num_draft_tokens_per_req))
    assert (batch.num_draft_tokens_per_req[:num_decodes] > 0).all()
    return num_decodes


def _with_heads(state: BlockState, slots: torch.Tensor, block_table: torch.Tensor, scratch: ScratchPages) -> BlockState:
    """Once per block, before its first drafts: give their pages what stands before the block in its own.

    It is final by then: the block before was committed in the forward before.
    """
    fields = state.fields
    due = (fields[:, Field.NUM_DRAFTS] > 0) & (fields[:, Field.HEADS] == 0) & (fields[:, Field.COMMIT] == 0)
    drafts = torch.arange(scratch.max_drafts, device=slots.device)
    wanted = due.unsqueeze(1) & (drafts < fields[:, Field.MAX_DRAFTS].unsqueeze(1))
    scratch.copy_heads(slots, fields[:, Field.BLOCK_START], block_table[: len(slots)], wanted)
    fields = fields.clone()
    fields[:, Field.HEADS] |= due
    return state._replace(fields=fields)
