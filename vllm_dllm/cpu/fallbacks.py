"""Which kernels, functions and methods of Model Runner V2 have a fallback for CPU tensors.

A kernel outside of these tables runs in Triton's interpreter, which takes 3 to 7 ms a launch.
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from vllm.triton_utils.dispatcher import register_kernels

from vllm_dllm.cpu import batch, rejection, sampling
from vllm_dllm.cpu.launch import adapt

Fallbacks = dict[str, Callable[..., Any]]

_GPU = "vllm.v1.worker.gpu"

KERNELS: Fallbacks = {
    f"{_GPU}.input_batch._prepare_prefill_inputs_kernel": batch.prepare_prefill_inputs,
    f"{_GPU}.input_batch._prepare_pos_seq_lens_kernel": batch.prepare_pos_seq_lens,
    f"{_GPU}.input_batch._combine_sampled_and_draft_tokens_kernel": batch.combine_sampled_and_draft_tokens,
    f"{_GPU}.input_batch._expand_idx_mapping_kernel": batch.expand_idx_mapping,
    f"{_GPU}.input_batch._get_num_sampled_and_rejected_kernel": batch.get_num_sampled_and_rejected,
    f"{_GPU}.input_batch._post_update_kernel": batch.post_update,
    f"{_GPU}.input_batch._post_update_num_computed_tokens_kernel": batch.post_update_num_computed_tokens,
    f"{_GPU}.sample.gumbel._temperature_kernel": sampling.apply_temperature,
    f"{_GPU}.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{_GPU}.sample.min_p._min_p_kernel": sampling.apply_min_p,
    f"{_GPU}.sample.penalties._penalties_kernel": sampling.apply_penalties,
    f"{_GPU}.sample.penalties._bincount_kernel": sampling.bincount,
    f"{_GPU}.sample.logit_bias._bias_kernel": sampling.apply_logit_bias,
    f"{_GPU}.sample.bad_words._bad_words_kernel": sampling.apply_bad_words,
    f"{_GPU}.sample.logprob._topk_log_softmax_kernel": sampling.topk_log_softmax,
    f"{_GPU}.sample.logprob._ranks_kernel": sampling.ranks,
    f"{_GPU}.sample.logprob._fill_logprob_token_ids_kernel": sampling.fill_logprob_token_ids,
    f"{_GPU}.structured_outputs._apply_grammar_bitmask_kernel": sampling.apply_grammar_bitmask,
    f"{_GPU}.spec_decode.rejection_sampler._gather_draft_sampled_kernel": rejection.gather_draft_sampled,
    f"{_GPU}.spec_decode.rejection_sampler._flatten_sampled_kernel": rejection.flatten_sampled,
}
"""Kernels, which vLLM's ``register_kernels`` takes."""

FUNCTIONS: Fallbacks = {
    # The kernels in these methods get tables of addresses; the methods still have the tensors.
    f"{_GPU}.block_table.BlockTables.gather_block_tables": batch.gather_block_tables,
    f"{_GPU}.block_table.BlockTables.compute_slot_mappings": batch.compute_slot_mappings,
    f"{_GPU}.buffer_utils.StagedWriteTensor.apply_write": batch.apply_write,
    f"{_GPU}.buffer_utils.FusedStagedWriter.apply": batch.apply_fused,
    # One verification is up to seven launches; as a whole it reads like the papers.
    f"{_GPU}.spec_decode.rejection_sampler.rejection_sample": rejection.rejection_sample,
    f"{_GPU}.spec_decode.standalone_ar.speculator.prepare_prefill_inputs": batch.prepare_draft_prefill_inputs,
}
"""Functions and methods that launch kernels, which ``register_kernels`` does not take."""


@functools.cache
def install() -> None:
    """Put all fallbacks in place. Idempotent.

    Raises:
        RuntimeError: vLLM no longer has a symbol, or not the parameters that its fallback needs.
    """
    register_kernels({name: adapted(name, fallback) for name, fallback in KERNELS.items()})
    for name, fallback in FUNCTIONS.items():
        owner, attribute, _ = resolve(name)
        setattr(owner, attribute, adapted(name, fallback))


def resolve(name: str) -> tuple[Any, str, Callable[..., Any]]:
    """Return (owner, attribute, value) of ``module.kernel``, ``module.function`` or ``module.Class.method``.

    Raises:
        RuntimeError: vLLM no longer has the symbol.
    """
    path, _, attribute = name.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
        return owner, attribute, getattr(owner, attribute)
    except (ImportError, AttributeError):
        raise RuntimeError(f"The installed vLLM has no {name}, which vllm-dllm replaces on a CPU") from None


def adapted(name: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fallback of a symbol with the symbol's parameters.

    Raises:
        RuntimeError: vLLM no longer has the symbol, or not the parameters that the fallback needs.
    """
    _, _, original = resolve(name)
    try:
        return adapt(original, fallback)
    except TypeError as error:
        raise RuntimeError(f"{name} of the installed vLLM {error}; vllm-dllm replaces it on a CPU") from None
