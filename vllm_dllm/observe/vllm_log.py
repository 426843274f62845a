"""vLLM's log: how this plugin writes to it, and what is not so for the models of this plugin at an engine's start."""

import logging
from collections.abc import Callable, Mapping
from functools import cache

from vllm.logger import init_logger

IN_EVERY_PROCESS = {
    # Our schedulers come in both kinds, and the engine gets the one of its kind.
    "vllm.config.scheduler": ("Using custom scheduler class", "vllm_dllm."),
}
OF_DIFFUSION_MODELS = {
    # Triton is, and its interpreter runs the kernels of a step.
    "vllm.platforms.cpu": ("Triton is not installed", ""),
}
"""By the logger that writes it: how a message begins before arguments are put in, and how its first argument does."""


def module_logger(name: str) -> logging.Logger:
    """The logger of a module: below vllm's namespace, or vLLM's log configuration drops the messages."""
    return init_logger(f"vllm.{name}")


def leave_out(messages: Mapping[str, tuple[str, str]]) -> None:
    """Keep messages out of this process's log from now on; idempotent."""
    for logger, beginnings in messages.items():
        logging.getLogger(logger).addFilter(_filter(*beginnings))


@cache  # a logger takes a filter once
def _filter(beginning: str, argument: str) -> Callable[[logging.LogRecord], bool]:
    def is_wanted(record: logging.LogRecord) -> bool:
        first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        return not (str(record.msg).startswith(beginning) and str(first).startswith(argument))

    return is_wanted
