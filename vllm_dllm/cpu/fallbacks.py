"""Which kernels, functions and methods of Model Runner V2 have a fallback for CPU tensors.

A kernel outside of the table runs in Triton's interpreter, which takes 3 to 7 ms a launch.
"""

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm.triton_utils.dispatcher import register_kernels

from vllm_dllm.cpu import batch, rejection, sampling
from vllm_dllm.cpu.launch import adapt

FALLBACKS: dict[str, Callable[..., Any]] = {
    "input_batch._prepare_prefill_inputs_kernel": batch.prepare_prefill_inputs,
    "input_batch._prepare_pos_seq_lens_kernel": batch.prepare_pos_seq_lens,
    "input_batch._combine_sampled_and_draft_tokens_kernel": batch.combine_sampled_and_draft_tokens,
    "input_batch._expand_idx_mapping_kernel": batch.expand_idx_mapping,
    "input_batch._get_num_sampled_and_rejected_kernel": batch.get_num_sampled_and_rejected,
    "input_batch._post_update_kernel": batch.post_update,
    "sample.gumbel._temperature_kernel": sampling.apply_temperature,
    "sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    "sample.min_p._min_p_kernel": sampling.apply_min_p,
    "sample.penalties._penalties_kernel": sampling.apply_penalties,
    "sample.logit_bias._bias_kernel": sampling.apply_logit_bias,
    "sample.logprob._topk_log_softmax_kernel": sampling.topk_log_softmax,
    "sample.logprob._ranks_kernel": sampling.ranks,
    "structured_outputs._apply_grammar_bitmask_kernel": sampling.apply_grammar_bitmask,
    "spec_decode.rejection_sampler._gather_draft_sampled_kernel": rejection.gather_draft_sampled,
    "spec_decode.rejection_sampler._flatten_sampled_kernel": rejection.flatten_sampled,
    # The kernels in these methods get tables of addresses; the methods still have the tensors.
    "block_table.BlockTables.gather_block_tables": batch.gather_block_tables,
    "block_table.BlockTables.compute_slot_mappings": batch.compute_slot_mappings,
    "buffer_utils.StagedWriteTensor.apply_write": batch.apply_write,
    "buffer_utils.FusedStagedWriter.apply": batch.apply_fused,
    # One verification is up to seven launches; as a whole it reads like the papers.
    "spec_decode.rejection_sampler.rejection_sample": rejection.rejection_sample,
}
"""By the name below ``vllm.v1.worker.gpu``: kernels, then functions and methods that launch kernels."""


class Replacement(NamedTuple):
    """A kernel, function or method of vLLM, where it is, and its fallback with the parameters of the original."""

    name: str
    owner: Any
    attribute: str
    original: Callable[..., Any]
    fallback: Callable[..., Any]

    @property
    def is_kernel(self) -> bool:
        return self.attribute.endswith("_kernel")


def install(vllm_kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Put all fallbacks in place: kernels by vLLM's own ``register_kernels``, which does not take functions.

    Args:
        vllm_kernels: vLLM's own fallbacks, which are registered together with these.

    Raises:
        RuntimeError: vLLM no longer has a symbol, or not the parameters that its fallback needs.
    """
    from vllm.v1.worker import gpu_worker

    # From vLLM 0.33 on the worker asks, too; the choice is made (`vllm_dllm.cpu.install`).
    if hasattr(gpu_worker, "HAS_TRITON"):
        gpu_worker.HAS_TRITON = True
    replacements = [find(symbol, fallback) for symbol, fallback in FALLBACKS.items()]
    register_kernels({**vllm_kernels, **{each.name: each.fallback for each in replacements if each.is_kernel}})
    for each in replacements:
        if not each.is_kernel:
            setattr(each.owner, each.attribute, each.fallback)


def find(symbol: str, fallback: Callable[..., Any]) -> Replacement:
    """Find what ``fallback`` replaces, by its name below ``vllm.v1.worker.gpu``.

    Raises:
        RuntimeError: vLLM no longer has the symbol, or not the parameters that the fallback needs.
    """
    name = f"vllm.v1.worker.gpu.{symbol}"
    path, _, attribute = name.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, attribute)
        return Replacement(name, owner, attribute, original, adapt(original, fallback))
    except (ImportError, AttributeError):
        raise RuntimeError(f"The installed vLLM has no {name}, which vllm-dllm replaces on a CPU") from None
    except TypeError as error:
        raise RuntimeError(f"{name} of the installed vLLM {error}; vllm-dllm replaces it on a CPU") from None
