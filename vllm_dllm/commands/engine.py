"""vLLM in this process, for commands that print something else than its log."""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from vllm import LLM

CPU_KV_CACHE_BYTES = 1 << 30
"""On a CPU vLLM would otherwise claim most of the memory."""


def start_engine(model: str, *, hint: str = "--model", **arguments: Any) -> "LLM":
    """Start vLLM.

    Args:
        model: path or hub name.
        hint: the option that named it.
        arguments: of `vllm.LLM`.

    Raises:
        typer.BadParameter: the model or its tokenizer cannot be loaded; says why.
    """
    if model.startswith(("/", ".")) and not Path(model).is_dir():
        raise typer.BadParameter(f"there is no folder {model}", param_hint=hint)
    # vLLM and torch read these when they are imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    try:
        return LLM(
            model,
            max_model_len=-1,  # as much as the KV cache has room for
            enforce_eager=on_cpu,  # compiling takes longer than a few prompts
            kv_cache_memory_bytes=CPU_KV_CACHE_BYTES if on_cpu else None,
            use_tqdm_on_load=False,
            **arguments,
        )
    except (OSError, ValueError) as error:
        # Whatever is wrong with the files of a model ends up as one of these.
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        reason = reason.removeprefix("Value error, ")
        raise typer.BadParameter(f"{model} cannot be loaded: {reason}", param_hint=hint) from error
