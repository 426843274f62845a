"""Stat loggers that a model's configuration names (``patches/004-model-stat-loggers.diff``).

vLLM's entry point for stat loggers is of no use here: a logger it finds turns statistics on for every
model, also under ``--disable-log-stats``, and is left out of offline engines.
"""

import functools
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerFactory, StatLoggerManager

MARKER = "model_stat_loggers"


def apply() -> bool:
    """Change ``StatLoggerManager.__init__``; False where vLLM has the change."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.metrics.loggers import StatLoggerManager

    original = of_vllm(StatLoggerManager, "__init__", ("self", "vllm_config", "engine_idxs", "custom_stat_loggers"))
    if mentions(original, MARKER):
        return False

    @functools.wraps(original)
    def init(
        self: "StatLoggerManager",
        vllm_config: "VllmConfig",
        engine_idxs: list[int] | None = None,
        custom_stat_loggers: "list[StatLoggerFactory] | None" = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        names = getattr(vllm_config.model_config.hf_config, MARKER, ())
        # The model's loggers come first: they take numbers out of the statistics that a user's logger must not see.
        loggers = [*map(resolve_obj_by_qualname, names), *(custom_stat_loggers or ())]
        original(self, vllm_config, engine_idxs, loggers or None, *args, **kwargs)

    StatLoggerManager.__init__ = init
    return True
