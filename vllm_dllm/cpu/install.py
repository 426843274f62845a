"""What the stand-in changes in vLLM on a CPU, in one place."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_dllm.cpu import runner, stand_in

_GPU = "vllm.v1.worker.gpu"


class Replacement(NamedTuple):
    """What launches Triton in Model Runner V2 and the function that takes its place on CPU tensors."""

    module: str
    symbol: str
    """``kernel``, ``function`` or ``Class.method``, in ``module``, as it is looked up there."""
    function: str
    """``module.function``, under ``vllm_dllm.cpu``; has the parameters of the symbol."""


REPLACEMENTS = (
    Replacement(f"{_GPU}.input_batch", "_prepare_prefill_inputs_kernel", "batch.prepare_prefill_inputs"),
    Replacement(f"{_GPU}.input_batch", "_prepare_pos_seq_lens_kernel", "batch.prepare_pos_seq_lens"),
    Replacement(
        f"{_GPU}.input_batch",
        "_combine_sampled_and_draft_tokens_kernel",
        "batch.combine_sampled_and_draft_tokens",
    ),
    Replacement(f"{_GPU}.input_batch", "_expand_idx_mapping_kernel", "batch.expand_idx_mapping"),
    Replacement(f"{_GPU}.input_batch", "_get_num_sampled_and_rejected_kernel", "batch.get_num_sampled_and_rejected"),
    Replacement(f"{_GPU}.input_batch", "_post_update_kernel", "batch.post_update"),
    Replacement(
        f"{_GPU}.input_batch",
        "_post_update_num_computed_tokens_kernel",
        "batch.post_update_num_computed_tokens",
    ),
    # These kernels get tables of addresses; the methods around them still have the tensors.
    Replacement(f"{_GPU}.block_table", "BlockTables.gather_block_tables", "batch.gather_block_tables"),
    Replacement(f"{_GPU}.block_table", "BlockTables.compute_slot_mappings", "batch.compute_slot_mappings"),
    Replacement(f"{_GPU}.buffer_utils", "StagedWriteTensor.apply_write", "batch.apply_write"),
    Replacement(f"{_GPU}.buffer_utils", "FusedStagedWriter.apply", "batch.apply_fused"),
    Replacement(f"{_GPU}.sample.gumbel", "_temperature_kernel", "sampling.apply_temperature"),
    Replacement(f"{_GPU}.sample.gumbel", "_gumbel_sample_kernel", "sampling.gumbel_sample"),
    Replacement(f"{_GPU}.sample.min_p", "_min_p_kernel", "sampling.apply_min_p"),
    Replacement(f"{_GPU}.sample.penalties", "_penalties_kernel", "sampling.apply_penalties"),
    Replacement(f"{_GPU}.sample.penalties", "_bincount_kernel", "sampling.bincount"),
    Replacement(f"{_GPU}.sample.logit_bias", "_bias_kernel", "sampling.apply_logit_bias"),
    Replacement(f"{_GPU}.structured_outputs", "_apply_grammar_bitmask_kernel", "sampling.apply_grammar_bitmask"),
    Replacement(f"{_GPU}.sample.bad_words", "_bad_words_kernel", "sampling.apply_bad_words"),
    Replacement(f"{_GPU}.sample.logprob", "_topk_log_softmax_kernel", "sampling.topk_log_softmax"),
    Replacement(f"{_GPU}.sample.logprob", "_ranks_kernel", "sampling.ranks"),
    Replacement(f"{_GPU}.sample.logprob", "_fill_logprob_token_ids_kernel", "sampling.fill_logprob_token_ids"),
    Replacement(
        f"{_GPU}.spec_decode.rejection_sampler", "_gather_draft_sampled_kernel", "rejection.gather_draft_sampled"
    ),
    Replacement(f"{_GPU}.spec_decode.rejection_sampler", "_flatten_sampled_kernel", "rejection.flatten_sampled"),
    # One verification is up to seven launches; as a whole it reads like the papers.
    Replacement(f"{_GPU}.spec_decode.rejection_sampler", "rejection_sample", "rejection.rejection_sample"),
    Replacement(
        f"{_GPU}.spec_decode.standalone_ar.speculator", "prepare_prefill_inputs", "batch.prepare_draft_prefill_inputs"
    ),
)
"""Kernels that are not in this table run in Triton's interpreter, at 3 to 7 ms a launch."""


@functools.cache
def install() -> None:
    """Finish what the platform entry point began; does nothing without the stand-in. Idempotent.

    Called from the general entry point, after ``vllm.triton_utils`` was imported and before any model is. The
    kernels are replaced where vLLM's CPU platform registers its own, in each worker.

    Raises:
        RuntimeError: a seam of vLLM has moved.
    """
    if not stand_in.active():
        return
    stand_in.hide()
    runner.install()

    from vllm.platforms.cpu import CpuPlatform

    register_vllm_kernels = CpuPlatform.register_triton_kernel_overrides.__func__

    def register_triton_kernel_overrides(cls: type[CpuPlatform]) -> None:
        register_vllm_kernels(cls)
        replace_kernels()

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


@functools.cache
def replace_kernels() -> None:
    """Put the functions of ``REPLACEMENTS`` in place. Idempotent.

    Raises:
        RuntimeError: vLLM no longer has the symbol, or its parameters have changed.
    """
    for replacement in REPLACEMENTS:
        owner, attribute, original = resolve(replacement)
        setattr(owner, attribute, stand_in_for(original, implementation(replacement)))


def stand_in_for(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the place of ``original``: ``function``, which can be launched if ``original`` can."""
    from vllm.triton_utils.dispatcher import KernelOverride

    return KernelOverride(original, function) if is_kernel(original) else function


def is_kernel(symbol: Callable[..., Any]) -> bool:
    """Whether it is launched on a grid and not just called."""
    return hasattr(symbol, "fn")


def implementation(replacement: Replacement) -> Callable[..., Any]:
    """Return the function that takes the place of a launch."""
    module, name = replacement.function.split(".")
    return getattr(importlib.import_module(f"vllm_dllm.cpu.{module}"), name)


def resolve(replacement: Replacement) -> tuple[Any, str, Callable[..., Any]]:
    """Return (owner, attribute, value) of the symbol to replace.

    Raises:
        RuntimeError: vLLM no longer has the symbol, or its parameters have changed.
    """
    *owners, attribute = replacement.symbol.split(".")
    owner: Any = importlib.import_module(replacement.module)
    try:
        for name in owners:
            owner = getattr(owner, name)
        original = getattr(owner, attribute)
    except AttributeError:
        raise RuntimeError(
            f"{replacement.module} has no {replacement.symbol} any more, which vllm_dllm.cpu."
            f"{replacement.function} replaces on CPU: the seam has moved."
        ) from None
    expected = [*inspect.signature(getattr(original, "fn", original)).parameters]
    # num_warps is an option of a launch, not a parameter of a kernel.
    written_for = [*inspect.signature(implementation(replacement)).parameters]
    if [name for name in written_for if name != "num_warps"] != expected:
        raise RuntimeError(
            f"{replacement.module}.{replacement.symbol} takes {expected}, but vllm_dllm.cpu."
            f"{replacement.function} was written for {written_for}: the seam has moved."
        )
    return owner, attribute, original
