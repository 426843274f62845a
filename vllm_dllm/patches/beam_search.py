"""Beam search is refused for diffusion models (``patches/005-diffusion-beam-search.diff``).

Each of its steps asks for one token and the likeliest alternatives. A diffusion model would denoise a whole
block for that token, and score it in the light of the block's later tokens, which beam search then throws
away.
"""

import functools
from typing import Any

from vllm_dllm.patches.original import mentions, of_vllm

MESSAGE = (
    "Beam search is not supported for diffusion language models: it extends a sequence by one token at a "
    "time, and they denoise blocks. Use n with a temperature for several answers."
)


def apply() -> bool:
    """Change both ``beam_search`` methods; False where vLLM has the change."""
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    return all([_refuse_in(BeamSearchOfflineMixin), _refuse_in(BeamSearchOnlineMixin)])


def _refuse_in(owner: type) -> bool:
    from vllm.exceptions import VLLMValidationError

    original = of_vllm(owner, "beam_search", ("self",))
    if mentions(original, "is_diffusion"):
        return False

    @functools.wraps(original)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model_config.is_diffusion:
            raise VLLMValidationError(MESSAGE, parameter="use_beam_search")
        return original(self, *args, **kwargs)

    owner.beam_search = beam_search  # type: ignore[attr-defined]
    return True
