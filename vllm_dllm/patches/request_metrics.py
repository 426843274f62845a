"""``--per-request-spec-decode-metrics`` for diffusion models
(``patches/002-diffusion-request-metrics.diff``).

Their scheduler makes the same observations, but vLLM only lets a speculative configuration ask for them.
"""

import functools
from typing import TYPE_CHECKING

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def apply() -> bool:
    """Change the check in ``VllmConfig.__post_init__``; False where vLLM has the change."""
    from vllm.config import VllmConfig

    original = of_vllm(VllmConfig, "__post_init__", ("self",))
    if mentions(original, "requires a diffusion model or speculative decoding"):
        return False

    @functools.wraps(original)
    def post_init(self: "VllmConfig") -> None:
        observability = self.observability_config
        level = observability.per_request_spec_decode_metrics
        if self.model_config is not None and self.model_config.is_diffusion:
            # The check is one of very many in a long function: it passes where the option is off.
            observability.per_request_spec_decode_metrics = "none"
        try:
            original(self)
        finally:
            observability.per_request_spec_decode_metrics = level

    VllmConfig.__post_init__ = post_init
    return True
