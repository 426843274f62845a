"""Options of the engine (``additional_config={"dllm": {...}}``) and of a request (``extra_args`` / ``vllm_xargs``).

Both are validated here and nowhere else: the engine's when it starts, a request's when it is admitted.
"""

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from vllm_dllm.decoding.fef import DEFAULT_REMASK
from vllm_dllm.decoding.policies import ALG_TEMP_POLICIES, TIMED_POLICIES, Policy
from vllm_dllm.traits import FamilyTraits

PolicyName = Literal[
    "static",
    "threshold",
    "sequential",
    "entropy",
    "localleap",
    "factor",
    "hierarchy",
    "random",
    "paced",
    "origin",
    "maskgit_plus",
    "topk_margin",
]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

VerifierName = Literal["none", "freedave", "spiffy", "psd", "fef"]
VERIFIER_NAMES: tuple[VerifierName, ...] = get_args(VerifierName)

CacheName = Literal["none", "prefix", "dual"]

DEFAULT_DRAFTS: dict[VerifierName, int] = {"none": 0, "freedave": 8, "spiffy": 3, "psd": 3, "fef": 16}
"""``drafts`` where nobody says: TraDo's d in FreeDave, Spiffy's D*, the depth at which PSD saturates; of FeF the
``window``."""

MOST_DRAFTS = 64
"""Largest ``drafts`` and ``max_drafts``; more than any block profits from."""

ENGINE_KEY = "dllm"
"""Key of our options inside vLLM's ``additional_config``."""

REQUEST_PREFIX = "dllm_"
"""Prefix of our keys inside ``SamplingParams.extra_args``, which only holds flat keys over HTTP."""


LOCALLEAP_THRESHOLD = 0.9

DEFAULT_GENERATION_WINDOW = 1024

SCHEDULES = ("tokens_per_step", "denoising_steps", "steps")
"""Options that say how many positions a step unmasks; a request gives one of them at most."""

MOST_STEPS = 1 << 16
"""Largest number of denoising steps. Without a schedule of timesteps a block takes one per position at most, whatever
this says."""

TIMED_STEPS_PER_POSITION = 8
"""Most timesteps of a block for each of its positions. Of more, most would unmask nothing."""

MOST_POST_EDIT_STEPS = 256
"""Largest ``max_post_edit_steps``. Tokens that are drawn anew with every look may never settle."""

MOST_PASSES = 64
"""Largest ``resample_steps``; paper 000 tries 2 and 4."""

LARGEST = 1e6
"""Of numbers that have no other bound. Of none of them does a larger one decide otherwise."""

LARGEST_SCALE = 1e3
"""Largest ``cfg_scale``. LLaDA's own are below 10; far above, the logits would leave what float16 can hold."""

LEAST_ALG_TEMP = 1e-4
"""Least ``alg_temp`` above 0. Far below, all scores divided by it are infinite, and none comes before another."""

MOST_SHOWN = 200
"""Characters of a wrong value that a message repeats."""

_LARGEST = 2**31 - 1
"""The worker keeps a request's options as 32-bit integers."""


class DecodingOptions(BaseModel):
    """Options that a request may set, and whose defaults the engine may set. ``None``: the next wider default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: PolicyName | None = None
    """Which masked positions a denoising step unmasks."""
    tokens_per_step: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    """Positions unmasked per denoising step (``static``, ``sequential``), or at least (``threshold``)."""
    denoising_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """Denoising steps per block; the alternative to ``tokens_per_step``, spread as the reference samplers do:
    ``block_length // steps`` per step, one more in the first ``block_length % steps`` steps."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """The same over all blocks of a request, as the samplers of LLaDA and Dream count: a multiple of the number of
    blocks that ``max_tokens`` makes."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Confidence above which ``threshold`` unmasks a position."""
    entropy_bound: Annotated[float, Field(gt=0.0, le=LARGEST)] | None = None
    """Total entropy in nats that one step of ``entropy`` may unmask."""
    edit_threshold: Annotated[float, Field(ge=0.0, le=LARGEST)] | None = None
    """Token editing (LLaDA2.1): replace an unmasked token when another one's probability exceeds this. None does above
    1, as the reference is told to edit nothing."""
    max_post_edit_steps: Annotated[int, Field(ge=0, le=MOST_POST_EDIT_STEPS)] | None = None
    """Denoising steps a block may spend on editing once nothing is masked in it."""
    relaxed_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Confidence from which ``localleap`` unmasks a position near an anchor (one that reaches ``threshold``)."""
    radius: Annotated[int, Field(ge=0, le=_LARGEST)] | None = None
    """Positions on either side of an anchor that ``localleap`` calls near."""
    factor: Annotated[float, Field(gt=0.0, le=LARGEST)] | None = None
    """Fast-dLLM's factor: ``factor`` unmasks the n most confident positions while ``(n + 1) * (1 - confidence)`` stays
    below it."""
    alg_temp: Annotated[float, Field(ge=0.0, le=LARGEST)] | None = None
    """Dream's temperature over positions: above 0 the positions to unmask are drawn by their scores instead of taken
    in their order. For ``maskgit_plus``, ``topk_margin`` and Dream's ``entropy``."""
    cfg_scale: Annotated[float, Field(ge=0.0, le=LARGEST_SCALE)] | None = None
    """Classifier-free guidance: how far logits are moved away from those of the same text with its prompt masked. 0 is
    off."""
    confidence_top_k: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    """Confidence, margin and entropy of the k most likely tokens alone. vLLM's ``top_k`` means that too, but nothing at
    temperature 0, where Dream's sampler knows it."""
    verify: VerifierName | None = None
    """Skips denoising steps: drafts later states of the block and verifies them all in one forward."""
    drafts: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] | Literal["auto"] | None = None
    """Drafts per forward, counted as each paper does: FreeDave's d counts the block itself, Spiffy's D* and PSD's d
    do not. ``auto``: as many as pay at the moment's load."""
    window: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] | None = None
    """Positions that a round of ``fef`` drafts (k in paper 000, 16 by default)."""
    resample_steps: Annotated[int, Field(ge=1, le=MOST_PASSES)] | None = None
    """Passes of ``fef`` over a block (N_step in paper 000, 2 by default): all but the first draw the least confident
    positions anew."""
    remask: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of a block's positions that a further pass of ``fef`` draws anew."""
    match: Literal["exact", "subset"] | None = None
    """What FreeDave accepts: a draft that equals the next state, or one whose tokens are all in it. Only the first
    decodes what the policy would decode without drafts."""
    eos_early_stop: bool | None = None
    """End inside a block, as soon as no position before a stop token is masked (the default): the same tokens with
    fewer forwards. Off, the last block is denoised whole first, as the reference samplers do."""

    @field_validator("denoising_steps", "steps")
    @classmethod
    def _one_schedule(cls, steps: int | None, info: ValidationInfo) -> int | None:
        others = [name for name in SCHEDULES if name != info.field_name and info.data.get(name) is not None]
        if steps is not None and others:
            raise ValueError(f"{', '.join(SCHEDULES)} exclude each other; give one of them")
        return steps

    @field_validator("alg_temp")
    @classmethod
    def _off_or_not_too_small(cls, alg_temp: float | None) -> float | None:
        if alg_temp is not None and 0 < alg_temp < LEAST_ALG_TEMP:
            raise ValueError(f"it must be 0, or at least {LEAST_ALG_TEMP}")
        return alg_temp


class DllmConfig(DecodingOptions):
    """Engine options: the defaults of every request, and what is fixed for the life of the engine."""

    block_length: Annotated[int, Field(ge=1)] | None = None
    """Diffusion block length; overrides the checkpoint's."""
    sub_block_length: Annotated[int, Field(ge=1)] | None = None
    """Finish blocks in sub-blocks of this length, left to right. Must divide the block length."""
    max_drafts: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] | None = None
    """Most drafts beside the block itself that any request may have in one forward; K/V pages are set aside for as
    many. Default: what the engine's own ``verify`` and ``drafts`` need."""
    draft_graph: str | None = None
    """File of a calibrated draft graph (``vllm-dllm calibrate``) for ``spiffy`` and ``psd``. Default: ``spiffy`` uses
    the one that ships for the model family, ``psd`` a chain."""
    eager: bool | None = None
    """Let drafts reach into the blocks after the current one, which pays where blocks are short."""
    cache: CacheName | None = None
    """What a model with full attention recomputes in a step: ``none`` everything, ``prefix`` the current block and all
    behind it, ``dual`` (the default) the current block. The rest keeps its K/V of the last refresh."""
    generation_window: Annotated[int, Field(ge=1)] | None = None
    """Most positions, from the current block on, that are part of the sequence; text further on enters as blocks are
    finished. For models with full attention."""
    refresh_interval: Annotated[int, Field(ge=1)] | None = None
    """Denoising steps after which all K/V are computed anew within a block. Default: at the start of a block only."""
    guidance: bool | None = None
    """Make room for ``cfg_scale``: such a request computes its text twice and has K/V pages for both. Default: where
    the engine's own ``cfg_scale`` needs it."""


class ResolvedOptions(BaseModel):
    """Options of one request after the request's, the engine's and the family's values were laid over each other."""

    model_config = ConfigDict(frozen=True)

    policy: PolicyName
    kind: Policy
    """What the policy is to the sampler: ``entropy`` is two."""
    quota: int
    """Positions per step; one more in the first ``quota_remainder`` steps of a block."""
    quota_remainder: int
    num_steps: int
    """Denoising steps of a block, for the policies with a schedule of timesteps."""
    threshold: float
    entropy_bound: float
    edit_threshold: float
    """``inf`` when token editing is off."""
    max_post_edit_steps: int
    relaxed_threshold: float
    radius: int
    factor: float
    alg_temp: float
    cfg_scale: float
    """0 when guidance is off."""
    verify: VerifierName
    num_drafts: int
    """Drafts beside the block itself, at most."""
    auto_drafts: bool
    """Fewer drafts where they do not pay."""
    window: int
    resample_steps: int
    remask: float
    subset_match: bool
    eos_early_stop: bool

    @property
    def needs_all_drafts(self) -> bool:
        """Tokens depend on the number of drafts, so load must not take any of them away."""
        return self.verify in ("psd", "fef") or self.subset_match


class OptionError(ValueError):
    """An option has a wrong name or value. ``key`` and ``value`` are what the user wrote."""

    def __init__(self, message: str, key: str, value: Any):
        super().__init__(message)
        self.key = key
        self.value = value


_Options = TypeVar("_Options", bound=BaseModel)


def shown(value: Any) -> str:
    """``value`` as a message repeats it: printable, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


def parse_options(model: type[_Options], values: dict[str, Any], prefix: str, where: str) -> _Options:
    """Validate ``values``. Messages call them ``where``, and a key by ``prefix`` and its name.

    Raises:
        OptionError: names the key, its value and what is allowed.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = f"{prefix}{first['loc'][0]}"
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(f"{prefix}{field}" for field in model.model_fields)
            raise OptionError(f"unknown {where} {shown(key)}; allowed: {allowed}", key, first["input"]) from None
        if first["type"] == "literal_error":
            reason = f"allowed: {first['ctx']['expected']}"
        else:
            reason = str(first["msg"]).removeprefix("Value error, ").lower()
        message = f"{where} {key}={shown(first['input'])} is not allowed: {reason}"
        raise OptionError(message, key, first["input"]) from None


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
    return parse_options(DllmConfig, values, "", "engine option")


def parse_request_options(extra_args: dict[str, Any] | None) -> DecodingOptions:
    """Validate the ``dllm_*`` keys of ``SamplingParams.extra_args``; other keys are left to their owners.

    Raises:
        OptionError: names the key, its value and what is allowed.
    """
    values = {
        key.removeprefix(REQUEST_PREFIX): value
        for key, value in (extra_args or {}).items()
        if isinstance(key, str) and key.startswith(REQUEST_PREFIX)
    }
    return parse_options(DecodingOptions, values, REQUEST_PREFIX, "request option")


def resolve(
    request: DecodingOptions,
    engine: DllmConfig,
    traits: FamilyTraits,
    block_length: int,
    max_tokens: int | None = None,
) -> ResolvedOptions:
    """Lay the request's options over the engine's, and those over the family's defaults.

    Args:
        max_tokens: of the request, where it is known: ``steps`` are spread over the blocks that it makes.

    Raises:
        OptionError: options that do not go together, or with the family or the engine.
    """
    values: dict[str, Any] = {
        name: next((v for v in (getattr(request, name), getattr(engine, name)) if v is not None), None)
        for name in DecodingOptions.model_fields
    }
    # A request that names one of the schedules replaces the engine's, whichever the engine named.
    if any(getattr(request, name) is not None for name in SCHEDULES):
        values |= {name: getattr(request, name) for name in SCHEDULES}
    if values["edit_threshold"] is not None and not traits.editing:
        raise OptionError(
            f"edit_threshold={values['edit_threshold']!r} is not allowed: {traits.family} models do not edit tokens "
            "(LLaDA2 models do)",
            "edit_threshold",
            values["edit_threshold"],
        )
    denoising_steps = _denoising_steps(values, traits, block_length, max_tokens)
    if denoising_steps is None:
        quota, remainder = values["tokens_per_step"] or 1, 0
    elif traits.attention == "full" and traits.shifted and engine.cache != "none":
        # The refresh at the start of a block is its first step, and decides its first position. The rest is spread over
        # the other steps, one more each in the first of them.
        quota, remainder = divmod(block_length - 1, max(denoising_steps - 1, 1))
        remainder += remainder > 0
    else:
        quota, remainder = divmod(block_length, denoising_steps)
    editing = values["edit_threshold"] is not None
    policy: PolicyName = values["policy"] or "threshold"
    kind = Policy[policy.upper()]
    if kind == Policy.ENTROPY and traits.timesteps and values["entropy_bound"] is None:
        kind = Policy.TIMED_ENTROPY
    timed = kind in TIMED_POLICIES
    most = TIMED_STEPS_PER_POSITION * block_length
    if timed and denoising_steps is not None and denoising_steps > most:
        key = "steps" if values["steps"] is not None else "denoising_steps"
        raise OptionError(
            f"{key}={values[key]!r} is not allowed with policy={policy!r}: that makes {denoising_steps} timesteps per "
            f"block of {block_length}, and there may be {most}",
            key,
            values[key],
        )
    # LocalLeap's anchors have a threshold of their own, whatever the family's sampler uses.
    threshold = LOCALLEAP_THRESHOLD if policy == "localleap" else traits.threshold
    relaxed_threshold = 0.4 if policy == "hierarchy" else 0.75
    verify: VerifierName = values["verify"] or "none"
    if request.verify not in (None, engine.verify) and request.drafts is None:
        # The engine's number was meant for another verifier, which may count differently.
        values["drafts"] = None
    window = min(values["window"] or DEFAULT_DRAFTS["fef"], block_length)
    if verify == "fef":
        _check_fef(request, engine)
        num_drafts = _num_fef_drafts(window, engine, block_length)
    else:
        num_drafts = _num_drafts(verify, values["drafts"], engine, block_length)
    subset_match = verify == "freedave" and values["match"] == "subset"
    alg_temp = _alg_temp(request, values, policy, kind)
    _check_guidance(values, engine, traits)
    _check_eager(values, engine, remainder=remainder, timed=timed or policy == "paced", subset_match=subset_match)
    if values["drafts"] == "auto" and (verify == "psd" or subset_match):
        raise OptionError(
            "drafts='auto' is not allowed with verify='psd' or match='subset': their tokens depend on the number of "
            "drafts, and would change with the load; give a number",
            "drafts",
            "auto",
        )
    return ResolvedOptions(
        policy=policy,
        kind=kind,
        quota=quota,
        quota_remainder=remainder,
        num_steps=denoising_steps or -(-block_length // quota),
        threshold=threshold if values["threshold"] is None else values["threshold"],
        entropy_bound=0.35 if values["entropy_bound"] is None else values["entropy_bound"],
        edit_threshold=values["edit_threshold"] if editing else float("inf"),
        max_post_edit_steps=16 if values["max_post_edit_steps"] is None else values["max_post_edit_steps"],
        relaxed_threshold=relaxed_threshold if values["relaxed_threshold"] is None else values["relaxed_threshold"],
        radius=4 if values["radius"] is None else values["radius"],
        factor=1.0 if values["factor"] is None else values["factor"],
        alg_temp=alg_temp,
        cfg_scale=values["cfg_scale"] or 0.0,
        verify=verify,
        num_drafts=num_drafts,
        auto_drafts=verify != "fef" and values["drafts"] == "auto" and num_drafts > 0,
        window=window,
        resample_steps=values["resample_steps"] or 2,
        remask=values["remask"] or DEFAULT_REMASK,
        subset_match=subset_match,
        eos_early_stop=values["eos_early_stop"] is not False,
    )


def _denoising_steps(
    values: dict[str, Any], traits: FamilyTraits, block_length: int, max_tokens: int | None
) -> int | None:
    """Denoising steps per block, where the user gives them."""
    steps = values["steps"]
    if steps is None:
        return values["denoising_steps"]
    if traits.attention != "full":
        raise OptionError(
            f"steps={steps!r} is not allowed: blocks of {traits.family} models do not begin where the prompt ends; "
            "give denoising_steps, which counts those of a block",
            "steps",
            steps,
        )
    if max_tokens is None:
        return None
    num_blocks = -(-max_tokens // block_length)
    if steps % num_blocks:
        raise OptionError(
            f"steps={steps!r} is not allowed: max_tokens={max_tokens} makes {num_blocks} blocks of {block_length}, and "
            f"each has as many steps; give a multiple of {num_blocks}",
            "steps",
            steps,
        )
    return steps // num_blocks


def _alg_temp(request: DecodingOptions, values: dict[str, Any], policy: PolicyName, kind: Policy) -> float:
    alg_temp = values["alg_temp"]
    if not alg_temp or kind in ALG_TEMP_POLICIES:
        return alg_temp or 0.0
    if request.alg_temp is None and (request.policy is not None or request.entropy_bound is not None):
        # The engine's was meant for another policy.
        return 0.0
    raise OptionError(
        f"alg_temp={alg_temp!r} is not allowed with policy={policy!r}, which does not draw positions by their scores; "
        "maskgit_plus and topk_margin do, and Dream's entropy, without an entropy_bound",
        "alg_temp",
        alg_temp,
    )


def _check_guidance(values: dict[str, Any], engine: DllmConfig, traits: FamilyTraits) -> None:
    scale = values["cfg_scale"]
    if not scale:
        return
    reason = None
    if traits.attention != "full":
        reason = (
            f"{traits.family} models do not compute their prompt again with every block (it is an option of models "
            "with full attention)"
        )
    elif not has_room_for_guidance(engine):
        reason = "this engine has no room for a second text; start it with the engine option guidance=True"
    elif values["verify"] not in (None, "none"):
        reason = f"it does not go with verify={values['verify']!r}; leave one of them out, or give verify='none'"
    if reason is not None:
        raise OptionError(f"cfg_scale={scale!r} is not allowed: {reason}", "cfg_scale", scale)


def has_room_for_guidance(engine: DllmConfig) -> bool:
    """Whether requests of an engine may have a ``cfg_scale``."""
    return bool(engine.cfg_scale) if engine.guidance is None else engine.guidance


def _check_eager(
    values: dict[str, Any], engine: DllmConfig, *, remainder: int, timed: bool, subset_match: bool
) -> None:
    if not engine.eager:
        return
    about_a_block = {
        "edit_threshold": values["edit_threshold"] is not None,
        "denoising_steps": remainder > 0,
        "policy": timed,
    }
    for key, asked in about_a_block.items():
        if asked:
            raise OptionError(
                f"{key}={values[key]!r} is not allowed with the engine option eager: it is about a block at a time",
                key,
                values[key],
            )
    if values["verify"] in ("psd", "fef") or subset_match:
        key = "match" if subset_match else "verify"
        raise OptionError(
            f"{key}={values[key]!r} is not allowed with the engine option eager: its tokens depend on when drafts were "
            "made, and a request that is preempted begins the blocks of its window anew",
            key,
            values[key],
        )


def _check_fef(request: DecodingOptions, engine: DllmConfig) -> None:
    if engine.refresh_interval is not None:
        raise OptionError(
            f"verify='fef' is not allowed with the engine option refresh_interval={engine.refresh_interval!r}: what "
            "was drafted before a refresh could not be verified after it",
            "verify",
            "fef",
        )
    for key in ("policy", "alg_temp", "drafts", *SCHEDULES):
        value = getattr(request, key)
        if value is not None:
            raise OptionError(
                f"{key}={value!r} is not allowed with verify='fef': it unmasks from left to right, as many positions "
                "as it can verify; its own options are window, resample_steps and remask",
                key,
                value,
            )


def fef_drafts(window: int, block_length: int) -> int:
    """Drafts beside the block that FeF has in a forward: the first of a window is none, nor is what fills the block."""
    return max(min(window - 1, block_length - 2), 0)


def _num_fef_drafts(window: int, engine: DllmConfig, block_length: int) -> int:
    wanted = fef_drafts(window, block_length)
    room = engine.max_drafts
    if room is None:
        room = wanted if engine.verify == "fef" else 0
    if wanted > room:
        raise OptionError(
            f"window={window} is not allowed: verify='fef' needs room for {wanted} drafts, and this engine has room "
            f"for {room} (engine option max_drafts)",
            "window",
            window,
        )
    return wanted


def drafts_beside_block(verify: VerifierName, drafts: int | None) -> int:
    """Drafts beside the block itself that a verifier's own count of ``drafts`` means."""
    if verify == "none":
        return 0
    drafts = DEFAULT_DRAFTS[verify] if drafts is None else drafts
    return max(drafts - 1, 0) if verify == "freedave" else drafts


def _num_drafts(
    verify: VerifierName, drafts: int | Literal["auto"] | None, engine: DllmConfig, block_length: int
) -> int:
    """Drafts beside the block; no more than the engine has room for where nobody gives a number."""
    if verify == "none":
        return 0
    useful = MOST_DRAFTS
    if not engine.eager and (verify == "freedave" or (verify == "psd" and engine.draft_graph is None)):
        # The block has one token more than nothing, each draft of a chain one more, and the last leaves a mask.
        useful = max(block_length - 2, 0)
    wanted = useful if drafts == "auto" else min(drafts_beside_block(verify, drafts), useful)
    room = engine.max_drafts
    if room is None:
        # An engine that does not say: room for its own drafts.
        own = engine.drafts if isinstance(engine.drafts, int) else None
        room = drafts_beside_block(engine.verify or "none", own)
    if wanted and not room:
        raise OptionError(
            f"verify={verify!r} is not allowed: this engine has no room for drafts; start it with max_drafts, or with "
            "verify as an engine option",
            "verify",
            verify,
        )
    if drafts is None or drafts == "auto":
        return min(wanted, room)
    if wanted > room:
        most = room + 1 if verify == "freedave" else room
        raise OptionError(
            f"drafts={drafts!r} is not allowed: this engine has room for {most} with verify={verify!r} "
            "(engine option max_drafts)",
            "drafts",
            drafts,
        )
    return wanted
