"""A bound on the default of ``max_num_seqs`` (``patches/012-default-max-num-seqs.diff``).

vLLM replaces an open ``max_num_seqs`` by a default for the device before a model's configuration hook runs, so a model
cannot tell the default from a number that the user chose.
"""

import functools
from typing import TYPE_CHECKING

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

IS_DEFAULT = "max_num_seqs_is_default"
"""On ``ModelConfig``: the user left ``max_num_seqs`` open, and the model's configuration hook may lower it."""

LARGEST_DEFAULT = "largest_default_max_num_seqs"
"""On ``ModelConfig``, set by whoever makes the speculative configuration: the default is at most this."""


def apply() -> bool:
    """Change how ``EngineArgs`` chooses the default; False where vLLM has the change."""
    from vllm.engine.arg_utils import EngineArgs

    name = "_set_default_max_num_seqs_and_batched_tokens_args"
    original = of_vllm(EngineArgs, name, ("self", "usage_context", "model_config", "parallel_config"))
    if mentions(original, IS_DEFAULT):
        return False

    @functools.wraps(original)
    def set_defaults(
        self: "EngineArgs",
        usage_context: "UsageContext | None",
        model_config: "ModelConfig",
        parallel_config: "ParallelConfig",
    ) -> None:
        is_default = self.max_num_seqs is None
        original(self, usage_context, model_config, parallel_config)
        setattr(model_config, IS_DEFAULT, is_default)
        largest = getattr(model_config, LARGEST_DEFAULT, None)
        if is_default and largest is not None:
            self.max_num_seqs = min(self.max_num_seqs, largest)

    setattr(EngineArgs, name, set_defaults)
    return True
