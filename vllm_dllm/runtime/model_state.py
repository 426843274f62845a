"""Diffusion inside vLLM's Model Runner V2: requests, row plan, attention metadata, sampler."""

from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_dllm.cpu import adapters
from vllm_dllm.geometry import Geometry, draft_graph_of, geometry_of
from vllm_dllm.kernels.page_copy import PageCopy
from vllm_dllm.methods import VERIFIER_ROWS
from vllm_dllm.options.resolve import options_of
from vllm_dllm.options.resolved import PREEMPTED_KEY
from vllm_dllm.patches import canvas_graphs, structured_outputs
from vllm_dllm.runtime.attention import attention_metadata
from vllm_dllm.runtime.backends import attention_layers
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.kept_windows import KeptWindows
from vllm_dllm.runtime.logits.grammar import GrammarRows
from vllm_dllm.runtime.plan.block import lay_out_step, plan_of
from vllm_dllm.runtime.plan.full import lay_out_full_step
from vllm_dllm.runtime.plan.full import plan_of as plan_of_full
from vllm_dllm.runtime.plan.full_table import Places, TextOrders
from vllm_dllm.runtime.plan.full_table import step_of as step_of_full
from vllm_dllm.runtime.plan.graph_views import GraphViews
from vllm_dllm.runtime.plan.rows import Buffers, Layout, RowPlan, Scheduled
from vllm_dllm.runtime.plan.scratch import ScratchPages, pages_of_a_draft, scratch_pages_of
from vllm_dllm.runtime.plan.spans import Spans, pages_of_a_request
from vllm_dllm.runtime.plan.table import step_of
from vllm_dllm.runtime.sampler import BlockDiffusionSampler
from vllm_dllm.runtime.states import DenoiseStates
from vllm_dllm.runtime.thinking import ThinkingBudgets


class DllmModelState(ModelState):
    """Runs the diffusion models of all families: their requests, and a plan of every step's rows.

    Models with full attention have ``spans``: a refresh computes their K/V, and a block is denoised against that K/V.
    vLLM's counter of computed tokens stays at 0 on the device for these models: the number of rows that the scheduler
    gives a request says where the request is, and the plan gives every row its position and slot.
    """

    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        adapters.mend(vllm_config, device)
        canvas_graphs.give_to_runner()
        self.geometry = geometry = geometry_of(vllm_config)
        self.traits, self.options = geometry.traits, geometry.options
        self.draft_graph = draft_graph_of(vllm_config)
        self.states = DenoiseStates(
            self.max_num_reqs,
            geometry,
            self.model_config.hf_config.mask_token_id,
            device,
            host_follows=not vllm_config.scheduler_config.async_scheduling,
        )
        self.kept_windows = KeptWindows(self.states)
        self.thinking = ThinkingBudgets(vllm_config.reasoning_config, self.max_num_reqs, geometry.block_length, device)
        self.stages = Stages(self.options.compile_steps or False)
        self._lay_out_stage = self.stages.stage(lay_out_step)
        self._lay_out_full_stage = self.stages.stage(lay_out_full_step)
        self.spans = Spans.of(geometry) if self.traits.sees_whole_text else None
        self.text_orders = TextOrders(self.max_num_reqs, self.max_model_len)
        # With data parallelism ranks may route rows that are not the first of their own forward, and vLLM marks
        # padding by its place: only at the end.
        alone = vllm_config.parallel_config.data_parallel_size == 1
        self._experts_skip_padding: bool = self.model_config.is_moe and envs.VLLM_MOE_SKIP_PADDING and alone
        adapter = getattr(model, "draft_adapter", None)
        # [rows of a forward]: 1 where the model's adapter is for a row.
        self.adapted_rows: torch.Tensor | None = None if adapter is None else adapter.rows
        self.layout: Layout | None = None
        self.graph_views: GraphViews | None = None
        self.plan: RowPlan | None = None
        self.req_states: RequestState | None = None

    # Requests come and go. Where no window is kept, leaving takes no work: the next request overwrites the slot.

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        request = new_req_data
        params, tokens, prompt = request.sampling_params, request.prefill_token_ids, request.prompt_token_ids
        assert params is not None and params.max_tokens is not None and tokens is not None and prompt is not None
        options, prompt_length, text_end = options_of(params, self.geometry), len(prompt), 0
        if self.spans is not None:
            num_tokens = min(params.max_tokens, self.max_model_len - prompt_length)
            text_end = self.spans.text_end(prompt_length, num_tokens, infill=options.holes is not None)
            self.text_orders.add_request(req_index, options.holes, text_end)
        grid_start, given_length = prompt_length if self.traits.blocks_from_prompt else 0, self.geometry.block_length
        if VERIFIER_ROWS[options.verify].is_autoregressive:
            # Blocks begin wherever a round ends. Only the first token of a block is the text's, the others are drafts.
            grid_start, given_length = len(tokens), 1
        given = self.thinking.add_request(
            req_index, params.thinking_token_budget, tokens, prompt_length, grid_start, given_length
        )
        was_preempted = PREEMPTED_KEY in (params.extra_args or {})
        self.kept_windows.enter(request.req_id, req_index, len(tokens), was_preempted=was_preempted)
        # The tokens that vLLM's scheduler stops at. `all_stop_token_ids` has tokens that the scheduler ignores, too.
        stop_token_ids = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        self.states.add_request(
            req_index,
            tokens,
            options,
            sorted(stop_token_ids),
            last_position=min(prompt_length + params.max_tokens, self.max_model_len) - 1,
            grid_start=grid_start,
            text_end=text_end,
            given=given,
            # PSD drafts a chain unless the user gives a graph. Spiffy always drafts with a graph.
            uses_graph=options.verify == "spiffy" or (options.verify == "psd" and self.options.draft_graph is not None),
        )

    def apply_staged_writes(self) -> None:
        self.states.rows.apply_write()
        self.kept_windows.apply()

    def remove_request(self, req_id: str) -> None:
        self.kept_windows.leave(req_id, self.req_states and self.req_states.req_id_to_index.get(req_id))

    # Start-up.

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: BlockTables) -> None:
        if block_tables.num_kv_cache_groups != 1:
            raise ValueError(
                f"{self.traits.family} needs one kind of K/V cache for all layers, but the model has "
                f"{block_tables.num_kv_cache_groups}"
            )
        layers = attention_layers(self.vllm_config, kv_cache_config, masks_differ=self.geometry.masks_differ)
        page_size = block_tables.block_sizes[0]
        self.layout = Layout(
            block_length=self.geometry.block_length,
            window_blocks=self.geometry.window_blocks,
            page_size=page_size,
            limit=self.geometry.longest_text(self.max_model_len),
            shifted=self.traits.shifted,
            commit_predicts=self.traits.commit_predicts,
            mask_token_id=self.states.mask_token_id,
            causal_context=self.traits.causal_context,
            causal_blocks=self.traits.causal_blocks,
            verifies_causally=self.geometry.verifies_causally,
            causal_cache=bool(self.options.causal_cache),
            causal_drafts=bool(self.options.causal_drafts),
            scratch=_scratch_pages(self.vllm_config, self.geometry, layers, kv_cache_config.num_blocks, page_size),
        )
        width = _table_width(self.geometry, self.max_model_len, self.layout)
        if block_tables.block_tables[0].gpu.shape[1] < width:
            table = StagedWriteTensor((self.max_num_reqs, width), dtype=torch.int32, device=self.device)
            block_tables.block_tables[0] = table
            block_tables.input_block_tables[0] = torch.zeros_like(table.gpu)
            block_tables.init_block_table_layout_tensors()
        compilation = self.vllm_config.compilation_config
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self.make_graph_views(compilation.max_cudagraph_capture_size, block_tables)

    def make_graph_views(self, max_rows: int, block_tables: BlockTables) -> None:
        """Make what CUDA graphs with attention read, for graphs of up to ``max_rows`` rows."""
        assert self.layout is not None
        width = block_tables.input_block_tables[0].shape[1]
        self.graph_views = GraphViews(self.layout, max_rows, width, self.device)

    def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
        if self.spans is not None:
            # Groups have as many rows as their texts, so attention stays outside of the graphs (piecewise graphs).
            return AttentionCGSupport.NEVER, "row plan of full attention"
        # All groups of decoding requests have the rows of a block, and `graph_views` have room for them.
        return AttentionCGSupport.UNIFORM_BATCH, "block-diffusion row plan"

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        self.req_states = sampler.req_states
        if self.spans is not None:
            more = cdiv(self.scheduler_config.max_num_batched_tokens, self.max_model_len)
            _widen_text(self.req_states, self.max_num_reqs + more)
        self.sampler = BlockDiffusionSampler(
            sampler,
            states=self.states,
            geometry=self.geometry,
            model=self.model,
            max_model_len=self.max_model_len,
            draft_graph=self.draft_graph,
            plan_of_step=lambda: self.plan,
            has_cache=lambda: self.layout is not None,
            stages=self.stages,
            thinking=self.thinking,
        )
        self.kept_windows.others = self.sampler.kept_by_position
        structured_outputs.give_to_runner(self.custom_structured_outputs_worker())
        return self.sampler, None

    def custom_structured_outputs_worker(self) -> GrammarRows:
        """What puts bitmasks on the logits. A vLLM that has diff 016 asks for it."""
        return self.sampler.grammar

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
        # For the sampler too, which comes after the forward.
        self.stages.begin_step(input_batch.req_ids)
        # The kernels of experts for CPUs compute every row.
        is_padding = input_batch.is_padding if self._experts_skip_padding and self.device.type != "cpu" else None
        adapted = None if self.adapted_rows is None else self.adapted_rows.zero_()
        buffers = Buffers(input_batch.input_ids, input_batch.positions, slot_mappings[0], adapted, is_padding)
        self.plan = plan = self._plan(input_batch, buffers, block_tables[0])
        # The runner takes the hidden states of these rows, and only these, to the logits.
        input_batch.logits_indices = plan.logits_rows
        views, num_rows = plan.views, input_batch.num_tokens
        if for_capture or cudagraph_mode == CUDAGraphMode.FULL:
            assert self.graph_views is not None
            assert for_capture or plan.num_decodes == input_batch.num_reqs
            num_rows = input_batch.num_tokens_after_padding
            views = self.graph_views.hold(None if for_capture else views, num_rows)
        most = _most_groups(self.geometry, self.max_num_reqs)
        return attention_metadata(
            views, attn_groups, kv_cache_config, num_rows=num_rows, slot_mappings=slot_mappings, most=most
        )

    def _plan(self, batch: InputBatch, buffers: Buffers, block_table: torch.Tensor) -> RowPlan:
        """What every row of the step is; writes ids, positions and K/V slots of the decoding requests' rows.

        Args:
            block_table: [R, pages] int32.
        """
        layout = self.layout
        assert layout is not None
        scheduled = Scheduled.of(batch, layout.limit)
        if self.spans is not None:
            return self._plan_full(self.spans, layout, scheduled, batch, buffers, block_table)
        num_decodes = scheduled.num_decodes
        slots_np = batch.idx_mapping_np[:num_decodes]
        options = self.states.options_of(slots_np, batch.idx_mapping[:num_decodes])
        drafting = self.states.may_have_drafts(slots_np)
        grid_start = self.states.asked["grid_start"][batch.idx_mapping_np[: batch.num_reqs]]
        step = step_of(scheduled, layout, drafting, grid_start, self.device)
        num_rows = len(step.table.index) * layout.block_length
        max_drafts = verifier = None
        if layout.drafts_share_pages and drafting.any():
            max_drafts = options.max_drafts
        if buffers.adapted is not None or layout.views_differ_by_verifier(drafting):
            verifier = options.verifier
        lay_out = self._lay_out_stage if num_decodes else lay_out_step
        laid_out, pages = lay_out(
            self.states.gather,
            layout,
            step.form,
            step.sent,
            step.branches,
            options.slots,
            block_table,
            scheduled.query_start_loc_on_device,
            max_drafts,
            buffers.first(num_rows),
            verifier,
        )
        if pages is not None:
            assert layout.scratch is not None
            layout.scratch.copy(*pages)
        return plan_of(scheduled, layout, step, laid_out)

    def _plan_full(
        self,
        spans: Spans,
        layout: Layout,
        scheduled: Scheduled,
        batch: InputBatch,
        buffers: Buffers,
        block_table: torch.Tensor,
    ) -> RowPlan:
        """The plan of a model with full attention."""
        slots_np = batch.idx_mapping_np[: scheduled.num_decodes]
        options = self.states.options_of(slots_np, batch.idx_mapping[: scheduled.num_decodes])
        asked = options.asked
        # vLLM's start-up steps have no decoding requests, and come before there is a sampler.
        text = options.slots.new_zeros(1, 1) if self.req_states is None else self.req_states.all_token_ids.gpu
        keeps, max_drafts = spans.cache != "none", None
        if layout.scratch is not None and keeps and asked["max_drafts"].any():
            max_drafts = options.max_drafts
        step = step_of_full(
            scheduled,
            layout,
            spans,
            Places.of(scheduled, spans, layout.page_size, asked),
            self.text_orders.of(slots_np),
            max_drafts=self.states.max_drafts,
            text_width=text.shape[1],
            num_columns=block_table.shape[1],
            device=self.device,
            copies=max_drafts is not None,
        )
        num_rows = len(step.sent["row_request"])
        lay_out = self._lay_out_full_stage if scheduled.num_decodes else lay_out_full_step
        laid_out, pages = lay_out(
            self.states.gather,
            layout,
            step.sent,
            keeps,
            options.slots,
            text,
            block_table,
            max_drafts,
            buffers.first(num_rows),
        )
        if pages is not None:
            assert layout.scratch is not None
            layout.scratch.copy(*pages)
        return plan_of_full(scheduled, step, laid_out)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        if self.layout is None and self.device.type != "cpu":
            # vLLM profiles its memory before there is a K/V cache, with one row of logits per request. A step may have
            # logits rows for a whole window and for all drafts of every request.
            num_branches = 1 + max(self.states.max_drafts, self.geometry.options.has_room_for_guidance)
            num_rows = min(input_batch.num_tokens, self.max_num_reqs * num_branches * self.states.window_length)
            input_batch.logits_indices = torch.arange(num_rows, device=self.device)
        return {}

    def prepare_inputs_embeds(self, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_dummy_inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def _widen_text(req_states: RequestState, num_rows: int) -> None:
    """Give vLLM's table of the requests' tokens ``num_rows`` rows, more than there are requests.

    With the counter at 0, vLLM reads as many tokens of a request as the request has rows, before the plan replaces the
    tokens. Masks and drafts are rows too, so vLLM reads beyond the request's own row of this table, and the last
    request's row needs something behind it.
    """
    text = req_states.all_token_ids
    # In place: vLLM's penalties hold the table too.
    StagedWriteTensor.__init__(
        text,
        (num_rows, req_states.max_model_len),
        dtype=text.dtype,
        device=req_states.device,
        max_concurrency=text.max_concurrency,
        uva_instead_of_gpu=hasattr(text, "_uva_buf"),
    )


def _most_groups(geometry: Geometry, max_num_reqs: int) -> int:
    """No step has more groups: blocks, and the pieces of blocks with which the chunks of prompts begin and end."""
    blocks = geometry.step_rows // geometry.block_length
    return blocks * (2 if geometry.options.causal_drafts else 1) + 2 * max_num_reqs


def _table_width(geometry: Geometry, max_model_len: int, layout: Layout) -> int:
    """Pages that a request's row of the block table must have room for."""
    # vLLM computes slots for all rows of a request before the plan replaces them. Those of the last block may lie
    # beyond max_model_len, and the look-up must not leave the request's row of the table.
    width = cdiv(max_model_len + geometry.canvas_length, layout.page_size)
    if layout.scratch is not None:
        # Nor must the pages that a draft's window may touch.
        width += layout.scratch.pages_per_draft
    if geometry.traits.sees_whole_text:
        width = max(width, pages_of_a_request(geometry, max_model_len, layout.page_size))
    return width


def _scratch_pages(
    vllm_config: VllmConfig, geometry: Geometry, layers: list[Any], num_pages: int, page_size: int
) -> ScratchPages | None:
    if not geometry.max_drafts:
        return None
    # A kernel may split the pages of the tables; dimension 0 counts its own.
    caches = [layer.kv_cache.unflatten(0, (num_pages, -1)) for layer in layers]
    return ScratchPages(
        # The scheduler hands out the pages below.
        first_page=num_pages - scratch_pages_of(vllm_config, page_size),
        max_drafts=geometry.max_drafts,
        pages_per_draft=pages_of_a_draft(geometry, page_size),
        page_size=page_size,
        copy=PageCopy(caches),
    )
