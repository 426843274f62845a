"""The changes this plugin needs in vLLM, applied when vLLM loads it.

Each module makes one change, which ``patches/`` holds as a diff for vLLM itself, and leaves a vLLM alone
that already has it. ``VLLM_DLLM_DISABLE_PATCHES=1`` turns all of them off, for a vLLM the diffs were
applied to.
"""

import functools
import importlib
import os

DISABLE = "VLLM_DLLM_DISABLE_PATCHES"

PATCHES = (
    "sampling_params",
    "request_metrics",
    "finished_request",
    "model_stat_loggers",
    "beam_search",
    "speculative_methods",
    "request_admission",
    "draft_model_speculators",
    "ray_on_cpu",
    "dead_engine_status",
    "malformed_requests",
    "default_max_num_seqs",
    "misplaced_options",
    "scheduler_warm_up",
    "expected_errors",
    "structured_outputs",
    "completion_suffix",
    "changed_weights",
    "reloaded_experts",
    "stream_events",
    "canvas_graphs",
    "expected_compilation",
    "stream_validation",
)
"""Modules of this package in the order of ``patches/NNN-*.diff``. Each has ``apply() -> bool``."""


@functools.cache
def apply_all() -> tuple[str, ...]:
    """Apply every patch the installed vLLM lacks, once per process.

    Returns:
        Names of the patches that were applied.

    Raises:
        VllmChangedError: the installed vLLM no longer has what a patch changes.
    """
    if os.environ.get(DISABLE) == "1":
        return ()
    return tuple(name for name in PATCHES if importlib.import_module(f"{__name__}.{name}").apply())
