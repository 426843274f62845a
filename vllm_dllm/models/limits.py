"""Defaults of ``max_num_seqs`` where every request slot has memory of its own set aside.

vLLM's default, 1024 on an H100, suits autoregressive models, whose slots cost nothing.
"""

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.utils.mem_constants import MiB_bytes
from vllm.utils.torch_utils import get_dtype_size, kv_cache_dtype_str_to_dtype

from vllm_dllm.geometry import Geometry
from vllm_dllm.models.quantization import cache_dtype
from vllm_dllm.observe.vllm_log import module_logger
from vllm_dllm.patches.default_max_num_seqs import IS_DEFAULT, LARGEST_DEFAULT

logger = module_logger(__name__)

SCRATCH_SHARE = 8
"""Scratch pages take at most one in so many parts of the memory that vLLM may use for weights and K/V."""

DRAFT_LOGITS_SHARE = 32
"""A drafter's logits, kept from one round to the next, take at most one in so many parts of the device's memory."""


def limit_default_of_max_num_seqs(vllm_config: VllmConfig, geometry: Geometry) -> None:
    """Lower a default ``max_num_seqs`` so that scratch pages fit the device; a number of the user's stays.

    A request slot has scratch pages for ``max_drafts`` drafts. A step has blocks of so many requests at most; scratch
    pages of further slots would lie unused.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    from vllm_dllm.runtime.plan.scratch import pages_of_a_draft

    if not geometry.max_drafts or not getattr(vllm_config.model_config, IS_DEFAULT, False):
        return
    page_bytes = cache.block_size * _bytes_per_position(vllm_config)
    slot_bytes = geometry.max_drafts * pages_of_a_draft(geometry, cache.block_size) * page_bytes
    if cache.num_gpu_blocks_override is not None:
        memory = cache.num_gpu_blocks_override * page_bytes
    elif cache.kv_cache_memory_bytes is not None:
        memory = cache.kv_cache_memory_bytes
    else:
        memory = int(current_platform.get_device_total_memory() * cache.gpu_memory_utilization)
    limit = max(min(memory // (SCRATCH_SHARE * slot_bytes), geometry.step_rows // geometry.block_length), 1)
    limit = max(limit, scheduler.max_num_active_seqs or 0)
    if limit < scheduler.max_num_seqs:
        logger.info(
            "max_num_seqs is %d by default instead of %d: each request slot has scratch pages for max_drafts=%d "
            "drafts, %.1f MiB, which may take 1/%d of the memory. --max-num-seqs sets another number",
            limit,
            scheduler.max_num_seqs,
            geometry.max_drafts,
            slot_bytes / MiB_bytes,
            SCRATCH_SHARE,
        )
        scheduler.max_num_seqs = limit


def _bytes_per_position(vllm_config: VllmConfig) -> int:
    """K/V of one position in all layers, on one device."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = kv_cache_dtype_str_to_dtype(cache_dtype(vllm_config), model)
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    return 2 * model.get_num_layers(parallel) * heads * get_dtype_size(dtype)


def limit_default_for_draft_logits(target: ModelConfig, num_drafts: int, dtype: torch.dtype) -> None:
    """Bound the default ``max_num_seqs`` where a drafter keeps logits ``[max_num_seqs, num_drafts, vocab]``."""
    slot_bytes = num_drafts * target.get_vocab_size() * get_dtype_size(dtype)
    limit = max(current_platform.get_device_total_memory() // (DRAFT_LOGITS_SHARE * slot_bytes), 1)
    setattr(target, LARGEST_DEFAULT, limit)
    logger.info(
        "Each request slot keeps %.1f MiB of logits for its %d drafts (draft_sample_method=greedy keeps none); "
        "max_num_seqs is at most %d by default, for which they take 1/%d of the memory. --max-num-seqs sets another "
        "number",
        slot_bytes / MiB_bytes,
        num_drafts,
        limit,
        DRAFT_LOGITS_SHARE,
    )
