"""Options of the engine (``additional_config={"dllm": {...}}``) and of a request (``extra_args`` / ``vllm_xargs``).

Both are validated here and nowhere else: the engine's when it starts, a request's when it is admitted.
"""

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from vllm_dllm.models.traits import FamilyTraits

PolicyName = Literal["static", "threshold", "sequential", "entropy"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

ENGINE_KEY = "dllm"
"""Key of our options inside vLLM's ``additional_config``."""

REQUEST_PREFIX = "dllm_"
"""Prefix of our keys inside ``SamplingParams.extra_args``, which only holds flat keys over HTTP."""


_LARGEST = 2**31 - 1
"""The worker keeps a request's options as 32-bit integers."""


class DecodingOptions(BaseModel):
    """Options that a request may set, and whose defaults the engine may set. ``None``: the next wider default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: PolicyName | None = None
    """Which masked positions a denoising step unmasks."""
    tokens_per_step: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    """Positions unmasked per denoising step (``static``, ``sequential``), or at least (``threshold``)."""
    denoising_steps: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    """Denoising steps per block; the alternative to ``tokens_per_step``, spread as the reference samplers do:
    ``block_length // steps`` per step, one more in the first ``block_length % steps`` steps."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Confidence above which ``threshold`` unmasks a position."""
    entropy_bound: Annotated[float, Field(gt=0.0)] | None = None
    """Total entropy in nats that one step of ``entropy`` may unmask."""
    edit_threshold: Annotated[float, Field(ge=0.0)] | None = None
    """Token editing (LLaDA2.1): replace an unmasked token when another one's probability exceeds this."""
    max_post_edit_steps: Annotated[int, Field(ge=0, le=_LARGEST)] | None = None
    """Denoising steps a block may spend on editing once nothing is masked in it."""
    eos_early_stop: bool | None = None
    """End inside a block, as soon as no position before a stop token is masked (the default): the same tokens with
    fewer forwards. Off, the last block is denoised whole first, as the reference samplers do."""

    @field_validator("denoising_steps")
    @classmethod
    def _one_schedule(cls, steps: int | None, info: ValidationInfo) -> int | None:
        if steps is not None and info.data.get("tokens_per_step") is not None:
            raise ValueError("tokens_per_step and denoising_steps exclude each other; give one of them")
        return steps


class DllmConfig(DecodingOptions):
    """Engine options: the defaults of every request, and what is fixed for the life of the engine."""

    block_length: Annotated[int, Field(ge=1)] | None = None
    """Diffusion block length; overrides the checkpoint's."""
    sub_block_length: Annotated[int, Field(ge=1)] | None = None
    """Finish blocks in sub-blocks of this length, left to right. Must divide the block length."""


class ResolvedOptions(BaseModel):
    """Options of one request after the request's, the engine's and the family's values were laid over each other."""

    model_config = ConfigDict(frozen=True)

    policy: PolicyName
    quota: int
    """Positions per step; one more in the first ``quota_remainder`` steps of a block."""
    quota_remainder: int
    threshold: float
    entropy_bound: float
    edit_threshold: float
    """``inf`` when token editing is off."""
    max_post_edit_steps: int
    eos_early_stop: bool


class OptionError(ValueError):
    """An option has a wrong name or value. ``key`` and ``value`` are what the user wrote."""

    def __init__(self, message: str, key: str, value: Any):
        super().__init__(message)
        self.key = key
        self.value = value


_Options = TypeVar("_Options", bound=DecodingOptions)


def _parse(model: type[_Options], values: dict[str, Any], prefix: str, where: str) -> _Options:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = f"{prefix}{first['loc'][0]}"
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(f"{prefix}{field}" for field in model.model_fields)
            raise OptionError(f"unknown {where} {key!r}; allowed: {allowed}", key, first["input"]) from None
        if first["type"] == "literal_error":
            reason = f"allowed: {first['ctx']['expected']}"
        else:
            reason = str(first["msg"]).removeprefix("Value error, ").lower()
        raise OptionError(f"{where} {key}={first['input']!r} is not allowed: {reason}", key, first["input"]) from None


def parse_engine_options(additional_config: dict[str, Any] | None) -> DllmConfig:
    """Validate ``additional_config["dllm"]``.

    Raises:
        OptionError: names the key, its value and what is allowed.
    """
    values = (additional_config or {}).get(ENGINE_KEY, {})
    if not isinstance(values, dict):
        raise OptionError(
            f"engine option additional_config[{ENGINE_KEY!r}]={values!r} is not allowed: it must be an object",
            ENGINE_KEY,
            values,
        )
    return _parse(DllmConfig, values, "", "engine option")


def parse_request_options(extra_args: dict[str, Any] | None) -> DecodingOptions:
    """Validate the ``dllm_*`` keys of ``SamplingParams.extra_args``; other keys are left to their owners.

    Raises:
        OptionError: names the key, its value and what is allowed.
    """
    values = {
        key.removeprefix(REQUEST_PREFIX): value
        for key, value in (extra_args or {}).items()
        if key.startswith(REQUEST_PREFIX)
    }
    return _parse(DecodingOptions, values, REQUEST_PREFIX, "request option")


def resolve(request: DecodingOptions, engine: DllmConfig, traits: FamilyTraits, block_length: int) -> ResolvedOptions:
    """Lay the request's options over the engine's, and those over the family's defaults.

    Raises:
        OptionError: token editing is asked of a family that was not trained for it.
    """
    values: dict[str, Any] = {
        name: next((v for v in (getattr(request, name), getattr(engine, name)) if v is not None), None)
        for name in DecodingOptions.model_fields
    }
    # A request that names one of the two schedules replaces the engine's, whichever the engine named.
    if request.tokens_per_step is not None:
        values["denoising_steps"] = None
    elif request.denoising_steps is not None:
        values["tokens_per_step"] = None
    if values["edit_threshold"] is not None and not traits.editing:
        raise OptionError(
            f"edit_threshold={values['edit_threshold']!r} is not allowed: {traits.family} models do not edit tokens "
            "(LLaDA2 models do)",
            "edit_threshold",
            values["edit_threshold"],
        )
    steps = values["denoising_steps"]
    quota, remainder = (values["tokens_per_step"] or 1, 0) if steps is None else divmod(block_length, steps)
    editing = values["edit_threshold"] is not None
    return ResolvedOptions(
        policy=values["policy"] or "threshold",
        quota=quota,
        quota_remainder=remainder,
        threshold=traits.threshold if values["threshold"] is None else values["threshold"],
        entropy_bound=0.35 if values["entropy_bound"] is None else values["entropy_bound"],
        edit_threshold=values["edit_threshold"] if editing else float("inf"),
        max_post_edit_steps=16 if values["max_post_edit_steps"] is None else values["max_post_edit_steps"],
        eos_early_stop=values["eos_early_stop"] is not False,
    )
