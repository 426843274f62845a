"""K/V pages that the scheduler may hand out, and whether they suffice for the longest request."""

import dataclasses
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_dllm.geometry import geometry_of
from vllm_dllm.runtime.plan.scratch import scratch_pages_of


def without_scratch_pages(vllm_config: Any, kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """The pages that the scheduler may hand out: all but those that drafts write to.

    Raises:
        ValueError: too few are left for one request of ``max_model_len``.
    """
    page_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    reserved = scratch_pages_of(vllm_config, page_size)
    geometry, max_model_len = geometry_of(vllm_config), vllm_config.model_config.max_model_len
    left = kv_cache_config.num_blocks - reserved
    # One page is vLLM's null page.
    needed = cdiv(geometry.longest_text(max_model_len), page_size) + 1
    if not reserved:
        # Whether the pages suffice for max_model_len vLLM itself has looked. FullAttentionScheduler counts its own.
        if left < needed and geometry.traits.causal_context:
            raise ValueError(
                f"one request of max_model_len={max_model_len} and its last block need {needed} KV pages of "
                f"{page_size} tokens, and there are {left}; lower max_model_len, or give the KV cache more memory"
            )
        return kv_cache_config
    max_drafts = geometry.max_drafts
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    if left < needed:
        raise ValueError(
            f"max_drafts={max_drafts} and max_num_seqs={max_num_seqs} set {reserved} KV pages of {page_size} tokens "
            f"aside for drafts, which leaves {left} of {kv_cache_config.num_blocks}, and one request of "
            f"max_model_len={max_model_len} needs {needed}; lower max_num_seqs or max_drafts, or max_model_len (-1 "
            "does not reckon with drafts), or give the KV cache more memory"
        )
    return dataclasses.replace(kv_cache_config, num_blocks=left)


def check_pages(vllm_config: Any, needed: int, num_pages: int, page_size: int) -> None:
    """Check that the longest request finds room; vLLM itself has looked whether ``max_model_len`` does.

    Raises:
        ValueError: it would wait forever.
    """
    left = num_pages - 1  # one is vLLM's null page
    if needed > left:
        guidance = geometry_of(vllm_config).guidance
        what = "twice, as guidance computes it" if guidance else "with its last block"
        raise ValueError(
            f"one request of max_model_len={vllm_config.model_config.max_model_len} needs {needed} KV pages of "
            f"{page_size} tokens {what}, and there are {left}; lower max_model_len"
            + (" or max_num_batched_tokens" if guidance else "")
            + ", or give the KV cache more memory"
        )
