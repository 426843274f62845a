"""vLLM's ``--speculative-config`` for a diffusion model: another way to choose the verifier and its drafts."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_dllm.methods import VERIFIER_NAMES, VERIFIER_ROWS
from vllm_dllm.options.errors import NO_DRAFT_MODEL, OptionError, parse_options
from vllm_dllm.options.schema import ENGINE_KEY, MOST_DRAFTS, parse_engine_options

DRAFT_VERIFIERS = tuple(name for name in VERIFIER_NAMES if name != "none")
"""What ``model`` may name beside the file of a draft graph."""


class DllmSpeculativeConfig(BaseModel):
    """``--speculative-config`` as vLLM hands it on, under the names that vLLM gives to the like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["dllm"] = "dllm"
    model: str = "freedave"
    """The verifier, or the file of a draft graph, which ``spiffy`` then uses. Default: the lossless one that needs
    no graph."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] | Literal["auto"] | None = None
    """The engine option ``drafts``, which counts as the verifier's paper does; of ``fef`` and ``s2d2`` ``window``."""

    @field_validator("method", mode="before")
    @classmethod
    def _no_verifier(cls, method: Any) -> Any:
        if method in DRAFT_VERIFIERS:
            raise ValueError(f'a verifier is the model; write {{"method": "dllm", "model": "{method}"}}')
        return method

    @field_validator("model")
    @classmethod
    def _verifier_or_graph(cls, model: str) -> str:
        if Path(model).is_dir():
            raise ValueError(NO_DRAFT_MODEL)
        if model not in DRAFT_VERIFIERS and not Path(model).is_file():
            raise ValueError(f"neither a verifier ({', '.join(DRAFT_VERIFIERS)}) nor the file of a draft graph")
        return model

    @property
    def engine_options(self) -> dict[str, Any]:
        """What it selects, as engine options (`vllm_dllm.options.schema.DllmConfig`)."""
        options: dict[str, Any] = {"verify": self.model}
        if self.model not in DRAFT_VERIFIERS:
            options = {"verify": "spiffy", "draft_graph": self.model}
        if self.num_speculative_tokens is not None:
            if not VERIFIER_ROWS[options["verify"]].options:
                raise OptionError(
                    f"num_speculative_tokens={self.num_speculative_tokens!r} is not allowed with model={self.model!r}, "
                    "which drafts the rest of a block; leave it out, or give the engine option block_length"
                )
            # What FeF drafts in a round, and S2D2 verifies, is a window.
            has_window = "window" in VERIFIER_ROWS[options["verify"]].options
            options["window" if has_window else "drafts"] = self.num_speculative_tokens
        return options


def lay_under_additional_config(
    speculative_config: dict[str, Any], additional_config: dict[str, Any] | None
) -> dict[str, Any]:
    """``additional_config`` with the engine options that ``speculative_config`` selects, or ``OptionError``."""
    if not speculative_config:
        raise OptionError(
            f"speculative_config={speculative_config!r} is not allowed: it chooses nothing; give "
            '{"method": "dllm", "model": "freedave"}, or leave it out'
        )
    selected = parse_options(DllmSpeculativeConfig, speculative_config, "", "speculative_config").engine_options
    given = parse_engine_options(additional_config).model_dump(exclude_none=True)
    for key, value in selected.items():
        if given.get(key, value) != value:
            raise OptionError(
                f"speculative_config asks for {key}={value!r} and additional_config[{ENGINE_KEY!r}] for "
                f"{key}={given[key]!r}; give one of them"
            )
    return {**(additional_config or {}), ENGINE_KEY: {**given, **selected}}
