"""What vLLM's log says at the start of an engine that is not so for the models of this plugin: left out."""

import logging
from typing import Any


class LeftOut(logging.Filter):
    """Messages that begin alike.

    Attributes:
        beginning: of the message, before arguments are put in.
        argument: beginning of its first argument.
    """

    def __init__(self, beginning: str, argument: str = "") -> None:
        super().__init__()
        self.beginning, self.argument = beginning, argument

    def filter(self, record: logging.LogRecord) -> bool:
        first: Any = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        return not (str(record.msg).startswith(self.beginning) and str(first).startswith(self.argument))


IN_EVERY_PROCESS = {
    # Our schedulers come in both kinds, and the engine gets the one of its kind.
    "vllm.config.scheduler": LeftOut("Using custom scheduler class", "vllm_dllm."),
}
OF_DIFFUSION_MODELS = {
    # Triton is, and its interpreter runs the kernels of a step.
    "vllm.platforms.cpu": LeftOut("Triton is not installed"),
}


def leave_out(messages: dict[str, LeftOut]) -> None:
    """Keep messages out of this process's log from now on; idempotent.

    Args:
        messages: by the logger that writes them.
    """
    for logger, left_out in messages.items():
        logging.getLogger(logger).addFilter(left_out)
