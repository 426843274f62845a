"""The configurations of SDAR, and of I-DLM (arXiv 2604.11035), whose checkpoints call themselves SDAR."""

import re
from typing import Any, ClassVar

from transformers import Qwen3Config

from vllm_dllm.models.base_config import BlockDiffusionConfig, own_name
from vllm_dllm.traits import FamilyTraits

_IDLM = re.compile(r"(^|[-_.])i[-_]?dlm(?![a-z])", re.IGNORECASE)
_SDAR = re.compile(r"sdar|trado", re.IGNORECASE)
_HOW_TO_SAY = (
    "say which one it is with use_regular_causal in config.json, true for I-DLM and false for SDAR, or with "
    "--config-format i_dlm"
)


def is_idlm(config: dict[str, Any], name: str) -> bool:
    """Whether a checkpoint with ``model_type: sdar`` is an I-DLM model, by its ``config.json`` or by its name.

    SGLang's key for causal attention decides where it is given. The published checkpoints leave it out.

    Raises:
        ValueError: it may be either, and would write nonsense as the wrong one.
    """
    if (is_causal := config.get("use_regular_causal")) is not None:
        return bool(is_causal)
    own = own_name(name)
    if _IDLM.search(own) and not _SDAR.search(own):
        return True
    masks = config.get("block_size")
    if masks in (1, 2, 3):
        raise ValueError(
            f"block_size={masks} of {name} is that of an I-DLM model, whose name has I-DLM in it, and not that of an "
            f"SDAR model: {_HOW_TO_SAY}"
        )
    return False


class SDARConfig(BlockDiffusionConfig, Qwen3Config):
    """SDAR and TraDo: a Qwen3 backbone."""

    model_type = "sdar"
    traits = FamilyTraits(family="SDAR", block_length=4, mask_token_id=151669)
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {"use_regular_causal": (False, None)}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a checkpoint of SDAR, or one of I-DLM; returns what Transformers' method of this name does."""
        if cls is SDARConfig and is_idlm(config_dict, str(kwargs.get("name_or_path", ""))):
            return IDLMConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)

    def check_supported_values(self) -> None:
        """Refuse settings that the backbone cannot do, and what ``--hf-overrides`` say too late."""
        if getattr(self, "use_regular_causal", None):
            raise ValueError(f"use_regular_causal=True comes too late in --hf-overrides: {_HOW_TO_SAY}")
        super().check_supported_values()


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

    block_size: int | None = None
    """Masks of a forward, one less than the tokens that it writes at most (N). A block of ours has 2N - 1 positions."""
    use_regular_causal: bool | None = None
    """``None``, whatever ``config.json`` says: what the model is has been decided. ``to_dict`` says true."""

    def __post_init__(self, **kwargs: Any) -> None:
        self.use_regular_causal = None
        if self.block_size is None:
            self.block_size = 3 if self.block_length is None else (self.block_length - 1) // 2
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(
                f"block_size={self.block_size!r} is not allowed: it counts the masks of a forward of I-DLM models; "
                "allowed: a whole number of at least 1"
            )
        if self.block_length is None:
            self.block_length = 2 * self.block_size + 1
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """What can be written to ``config.json``, and is read as this."""
        return super().to_dict() | {"use_regular_causal": True}

    def check_supported_values(self) -> None:
        """Refuse settings that the backbone cannot do, and what ``--hf-overrides`` say too late."""
        if self.use_regular_causal is not None:
            raise ValueError(
                f"use_regular_causal={self.use_regular_causal} comes too late in --hf-overrides: {_HOW_TO_SAY}"
            )
        # The engine's length, once there is an engine, may be another one than the checkpoint's.
        if self.geometry is None and self.block_length != 2 * (self.block_size or 0) + 1:
            raise ValueError(
                f"block_size={self.block_size} and block_length={self.block_length} contradict each other: a forward "
                "with N - 1 masks has 2N - 1 positions; set their number with the engine option block_length"
            )
        super().check_supported_values()
