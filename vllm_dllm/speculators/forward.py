"""A diffusion model as a drafter inside vLLM: its start, and forwards of planned rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, replace, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.cpu import adapters
from vllm_dllm.options.drafter import DrafterOptions
from vllm_dllm.runtime.attention import attention_metadata
from vllm_dllm.runtime.backends import check_backends, choose_backend
from vllm_dllm.runtime.plan.drafter import DraftRows
from vllm_dllm.runtime.plan.rows import PAD_SLOT_ID, Views
from vllm_dllm.speculators.graphs import DrafterGraphs, graphs_of
from vllm_dllm.speculators.vocabulary import shared_vocabulary_of


class DiffusionDrafter(DraftModelSpeculator):
    """The drafter, a diffusion model of any family of this plugin.

    The drafter's K/V is in a cache group of its own, which vLLM manages like the target's.
    """

    draft_logits: torch.Tensor | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        adapters.mend(vllm_config, device)  # the target's
        hf_config = self.draft_model_config.hf_config
        self.options = DrafterOptions.model_validate(hf_config.drafter_options)
        self.req_states = req_states
        scheduler_cls = vllm_config.scheduler_config.scheduler_cls
        if scheduler_cls != hf_config.draft_scheduler_cls and (self.options.recompute or self.options.adaptive):
            raise ValueError(
                f"scheduler_cls={scheduler_cls!r} does not know draft_cache=recompute and adaptive of "
                "speculative_config; leave one of them out"
            )
        self.drafter = hf_config.drafter(self.num_speculative_steps, self.draft_model_config.max_model_len)
        self.planned = self.drafter  # whose rows the forward of the text has
        self.vocabulary = shared_vocabulary_of(self.speculative_config, device)
        logits, num_target_ids = self.draft_logits, len(self.vocabulary.read_as)
        if logits is not None and logits.shape[-1] != num_target_ids:
            self.draft_logits = logits.new_zeros(*logits.shape[:-1], num_target_ids)
        self.draft_column = torch.arange(self.num_speculative_steps, dtype=torch.int32, device=device)
        self.own_group = _group_of_one() if self._is_replicated else None
        # Padding rows may have positions beyond the longest text, and look up pages there.
        self.rows_beyond = self.drafter.extra_rows + self.num_speculative_steps + 1
        self.spare_pages = 1
        self.graphs: DrafterGraphs | None = None

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        """vLLM's, whose dtype is the target's: ``--hf-overrides`` with a ``head_dtype`` do not reach the drafter."""
        return self.draft_model_config.head_dtype, 0.0

    @property
    def _is_replicated(self) -> bool:
        """Whether every rank of a tensor-parallel target has the whole drafter."""
        tensor_parallel_size = self.vllm_config.parallel_config.tensor_parallel_size
        return tensor_parallel_size > 1 and self.speculative_config.draft_tensor_parallel_size == 1

    @property
    def attn_vllm_config(self) -> VllmConfig:
        return self._draft_vllm_config

    @property
    def _backend(self) -> AttentionBackendEnum | None:
        """The user's choice for the drafter; ``None``: vLLM chooses. The target's backend may lack non-causal masks."""
        speculative, attention = self.speculative_config, self.vllm_config.attention_config
        backend = choose_backend(
            speculative.attention_backend,
            attention,
            speculative.kv_cache_dtype or self.vllm_config.cache_config.cache_dtype,
            masks_differ=self._masks_differ,
        )
        if backend is None and self._masks_differ and attention.flash_attn_version == 4:
            # It compiles one kernel for causal flags and for the target, whose rows are all causal.
            return AttentionBackendEnum.TRITON_ATTN
        return backend

    @property
    def _masks_differ(self) -> bool:
        return self.drafter.context == "causal-context"

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        speculative, config = self.speculative_config, self.vllm_config
        cache_config = config.cache_config
        if speculative.kv_cache_dtype is not None:
            cache_config = replace(cache_config, cache_dtype=speculative.kv_cache_dtype)
        rank = 0 if self._is_replicated else config.parallel_config.rank
        self._draft_vllm_config = replace(
            config,
            model_config=self.draft_model_config,
            quant_config=None,
            lora_config=None,  # adapters are laid over the target alone
            cache_config=cache_config,
            parallel_config=replace(speculative.draft_parallel_config, rank=rank),
            attention_config=replace(
                config.attention_config,
                use_non_causal=True,
                backend=self._backend,
            ),
        )
        with set_model_tag("dllm_drafter"), self._ranks():
            model = get_model(vllm_config=self._draft_vllm_config, prefix="draft_model")
        return model

    def set_attn(self, model_state: Any, kv_cache_config: KVCacheConfig, block_tables: BlockTables, *args: Any) -> None:
        # Backends read the configuration that is current, which has to be the drafter's.
        with set_current_vllm_config(self._draft_vllm_config):
            super().set_attn(model_state, kv_cache_config, block_tables, *args)
        backends = (group.backend for groups in self.attn_groups for group in groups)
        check_backends(backends, self.vllm_config.attention_config, masks_differ=self._masks_differ)
        if any(group.kernel_block_size is not None for groups in self.attn_groups for group in groups):
            raise ValueError(
                "the drafter's attention backend splits KV pages, which works for whole requests only; set another "
                "attention_backend in speculative_config, or a smaller --block-size"
            )
        self.groups = [index for index, groups in enumerate(self.attn_groups) if groups]
        length = self.drafter.block_length
        sizes = [block_tables.block_sizes[group] for group in self.groups]
        if self.drafter.context == "block-causal" and any(size % length for size in sizes):
            # Prompts with the same beginning share pages of K/V, and K/V depends on whole blocks.
            raise ValueError(
                f"the drafter's KV pages of {sizes} tokens are no multiple of its diffusion block_length={length}; set "
                "--block-size"
            )
        self.spare_pages = max(cdiv(self.rows_beyond, size) for size in sizes)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # The number of attention groups changes from round to round, so that attention stays outside.
        self.graphs = graphs_of(self.model, cudagraph_mode, self._draft_vllm_config, self.device)

    def capture(self) -> None:
        if self.graphs is not None:
            self.graphs.capture_rounds(
                self.model, lambda ids, positions, mode: self._run(ids, positions, None, None, mode)
            )

    def _hidden_states(
        self, layout: DraftRows, query_start_loc: np.ndarray, on_device: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Run the drafter on the rows of a layout: ``[rows, hidden]``, padding behind them included."""
        # Masks and separator are ids of the drafter already, which may have more of them than the target.
        ids = layout.rows.tokens
        text = torch.where(layout.is_text, ids, 0).clamp_(0, len(self.vocabulary.read_as) - 1)
        ids = torch.where(layout.is_text, self.vocabulary.read_as[text], ids)
        num_rows = len(ids)
        ids, positions, mode = ids.int(), layout.rows.positions, CUDAGraphMode.NONE
        if self.graphs is not None:
            ids, positions, mode = self.graphs.place(ids, positions)
        metadata, slot_mappings = self._attention(layout, query_start_loc, on_device, num_rows, len(ids))
        return self._run(ids, positions, metadata, slot_mappings, mode)

    def _attention(
        self,
        layout: DraftRows,
        query_start_loc: np.ndarray,
        on_device: dict[str, torch.Tensor],
        num_rows: int,
        num_slots: int,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata of the rows, and by layer the K/V slots of the rows and of padding behind them."""
        tables: list[torch.Tensor] = list(self.block_tables.input_block_tables)
        slot_mappings = torch.full((len(tables), num_slots), PAD_SLOT_ID, dtype=torch.int64, device=self.device)
        for group in self.groups:
            # Padding may look beyond the last page.
            table = nn.functional.pad(self.block_tables.input_block_tables[group], (0, self.spare_pages))
            tables[group] = table[on_device["table_rows"]]
            slots = layout.rows.kv_slots(tables[group], self.block_tables.block_sizes[group])
            slot_mappings[group, :num_rows] = slots
        views = Views(
            query_start_loc=query_start_loc,
            query_start_loc_on_device=on_device["query_start_loc"].int(),
            block_tables=tables,
            seq_lens=layout.seq_lens,
            max_seq_len=self.max_model_len + self.rows_beyond,
            causal=layout.causal,
        )
        metadata = attention_metadata(
            views, self.attn_groups, self.kv_cache_config, num_rows=num_rows, slot_mappings=slot_mappings
        )
        return metadata, build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> torch.Tensor:
        """Hidden states ``[rows, hidden]``. Rows behind those of the metadata are padding."""
        num_rows = len(input_ids)
        self._prepare_eplb_forward(num_rows)
        with (
            self._ranks(),
            set_forward_context(
                metadata,
                self._draft_vllm_config,
                num_tokens=num_rows,
                cudagraph_runtime_mode=mode,
                slot_mapping=slot_mappings,
                batch_descriptor=BatchDescriptor(num_tokens=num_rows),
            ),
        ):
            inputs = {"input_ids": input_ids, "positions": positions}
            if mode == CUDAGraphMode.NONE:
                return self.model(**inputs)
            assert self.graphs is not None
            return self.graphs.run_pw_graph(self.model, inputs)

    def _dummy_forward(self, input_batch: InputBatch) -> None:
        """A forward with as many rows as a round of this batch would have, for vLLM's profiling and warm-up."""
        num_rows = input_batch.num_tokens + input_batch.num_reqs * self.drafter.extra_rows
        num_rows = min(num_rows, self.max_num_tokens)
        input_ids = torch.full((num_rows,), self.drafter.mask_token_id, dtype=torch.int32, device=self.device)
        hidden_states = self._run(input_ids, torch.zeros_like(input_ids, dtype=torch.int64), None, None)
        num_sampled = min(num_rows, input_batch.num_reqs * self.num_speculative_steps)
        self.compute_draft_logits(hidden_states[:num_sampled], 0)

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """``[rows, target's vocabulary]``; -inf for tokens that the drafter does not share with the target."""
        with self._ranks():
            return self.vocabulary.logits(super().compute_draft_logits(hidden_states, spec_step_idx))

    @contextmanager
    def _ranks(self) -> Iterator[None]:
        """The tensor-parallel ranks that the drafter is spread over."""
        shared = parallel_state._TP
        parallel_state._TP = self.own_group or shared
        try:
            yield
        finally:
            parallel_state._TP = shared


def _group_of_one() -> parallel_state.GroupCoordinator:
    """A tensor-parallel group of this rank alone; every rank calls this."""
    world = parallel_state.get_world_group()
    return parallel_state.init_model_parallel_group(
        [[rank] for rank in range(world.world_size)],
        world.local_rank,
        torch.distributed.get_backend(world.device_group),
        group_name="dllm_drafter",
    )
