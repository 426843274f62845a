"""The configuration of I-DLM models (arXiv 2604.11035), whose checkpoints call themselves SDAR."""

import re
from typing import Any, ClassVar

from transformers import Qwen3Config

from vllm_dllm.models.base_config import BlockDiffusionConfig, own_name
from vllm_dllm.traits import FamilyTraits

_NAME = re.compile(r"(^|[-_.])i-?dlm([-_.]|$)", re.IGNORECASE)


def is_idlm(config: dict[str, Any], name: str) -> bool:
    """Whether a checkpoint with ``model_type: sdar`` is an I-DLM model, by its ``config.json`` or by its name.

    SGLang's key for causal attention decides where it is given. The published checkpoints leave it out.
    """
    is_causal = config.get("use_regular_causal")
    return bool(is_causal) if is_causal is not None else _NAME.search(own_name(name)) is not None


class IDLMConfig(BlockDiffusionConfig, Qwen3Config):
    """I-DLM-{8B,32B}: a Qwen3 backbone, causal throughout."""

    model_type = "sdar"
    traits = FamilyTraits(
        family="I-DLM",
        block_length=7,
        mask_token_id=151669,
        shifted=True,
        commit_predicts=True,
        attention="causal",
        verifier="isd",
        draft_adapter="",
    )
    attribute_map: ClassVar[dict[str, str]] = {}
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {"use_regular_causal": (True, False, None)}

    block_size: int = 3
    """Masks of a forward, one less than the tokens that it writes at most (N). A block of ours has N - 1 more."""

    def __post_init__(self, **kwargs: Any) -> None:
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(
                f"block_size={self.block_size!r} is not allowed: it counts the masks of a forward of I-DLM models; "
                "allowed: a whole number of at least 1"
            )
        if self.block_length is None:
            self.block_length = 2 * self.block_size + 1
        super().__post_init__(**kwargs)
