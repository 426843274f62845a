"""Dream and Open-dCoder."""

import dataclasses
from typing import Any, ClassVar

from transformers import Qwen2Config

from vllm_dllm.models.configs.base import BlockDiffusionConfig
from vllm_dllm.traits import FamilyTraits


class DreamConfig(BlockDiffusionConfig, Qwen2Config):
    """Dream, Dream-Coder and DiffuCoder: a Qwen2.5 backbone."""

    model_type = "Dream"
    traits = FamilyTraits(
        family="Dream",
        block_length=32,
        mask_token_id=151666,
        shifted=True,
        threshold_inclusive=True,
        attention="full",
        timesteps=True,
    )
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_sliding_window": (False,),
        "use_mrope": (False, None),
    }


class _TraitsByContext:
    """Traits of a checkpoint whose ``context_attention`` is not the family's."""

    def __init__(self, traits: FamilyTraits):
        self.by_context = {
            "full": traits,
            "causal": dataclasses.replace(traits, attention="causal-context"),
        }

    def __get__(self, config: "OpenDCoderConfig | None", owner: type) -> FamilyTraits:
        return self.by_context["full" if config is None else config.context_attention]


class OpenDCoderConfig(BlockDiffusionConfig, Qwen2Config):
    """Open-dCoder: a Qwen2.5-Coder checkpoint trained for diffusion. Its ``config.json`` says plain ``qwen2``."""

    model_type = "open_dcoder"
    traits = _TraitsByContext(dataclasses.replace(DreamConfig.traits, family="Open-dCoder", mask_token_id=151665))
    supported_values = DreamConfig.supported_values

    context_attention: str = "full"
    """What finished text sees: ``full``: everything, as Open-dCoder was trained; ``causal``: what is before it, as the
    autoregressive model did that a drafter was made from."""

    def __post_init__(self, **kwargs: Any) -> None:
        allowed = type(self).__dict__["traits"].by_context
        if self.context_attention not in allowed:
            raise ValueError(
                f"context_attention={self.context_attention!r} is not allowed; allowed: {', '.join(map(repr, allowed))}"
            )
        super().__post_init__(**kwargs)
