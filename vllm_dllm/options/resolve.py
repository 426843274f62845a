"""A request's options laid over the engine's, and the engine's over the model family's: once, when it is admitted.

`vllm_dllm.options.admission` writes the result into the request's ``SamplingParams``, where the scheduler and the
workers find it with `options_of`.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_dllm.decoding.fef import DEFAULT_REMASK
from vllm_dllm.methods import (
    OPTION_DEFAULTS,
    POLICIES,
    POLICY_OPTIONS,
    SCHEDULES,
    VERIFIER_OPTIONS,
    VERIFIER_ROWS,
    VERIFIERS,
    Policy,
    PolicyName,
    PolicyRow,
    VerifierName,
    VerifierRow,
    policy_row,
)
from vllm_dllm.options.drafts import count_drafts, count_fef_drafts
from vllm_dllm.options.errors import not_allowed
from vllm_dllm.options.schema import REQUEST_PREFIX, DecodingOptions, DllmConfig, parse_request_options
from vllm_dllm.traits import FamilyTraits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_dllm.geometry import Geometry

DEFAULT_POLICY = "threshold"

RESOLVED_KEY = REQUEST_PREFIX + "resolved"
"""Key of the resolved options in ``extra_args``. No request may bring it: it is no name of an option."""

TIMED_STEPS_PER_POSITION = 8
"""Most timesteps of a block for each of its positions. With more timesteps most would unmask nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedOptions:
    """Options of one request; every field has a value that the scheduler and the worker can use as it is."""

    policy: PolicyName
    kind: Policy
    """What the policy is to the sampler: ``entropy`` is the name of two."""
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
    confidence_top_k: int | None
    """``None``: confidence, margin and entropy are those of all tokens."""
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


def carry(params: "SamplingParams", options: ResolvedOptions) -> None:
    """Replace the options in ``params``, which belong to one request, by what they were resolved to.

    The record is a plain dictionary of numbers and words, because ``extra_args`` travels as msgpack and as pickle.
    """
    others = {
        key: value
        for key, value in (params.extra_args or {}).items()
        if not (isinstance(key, str) and key.startswith(REQUEST_PREFIX))
    }
    params.extra_args = {**others, RESOLVED_KEY: dataclasses.asdict(options)}


def options_of(params: "SamplingParams | None", geometry: "Geometry") -> ResolvedOptions:
    """The resolved options of a request, in the scheduler and in the workers.

    A request that was never admitted, as those of vLLM's warm-up, is resolved here.

    Raises:
        OptionError: as `resolve`, for a request that was never admitted.
    """
    extra_args = {} if params is None else params.extra_args or {}
    record = extra_args.get(RESOLVED_KEY)
    if record is not None:
        return ResolvedOptions(**{**record, "kind": Policy(record["kind"])})
    return resolve(
        parse_request_options(extra_args),
        geometry.options,
        geometry.traits,
        geometry.block_length,
        None if params is None else params.max_tokens,
    )


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
    values = _lay_over(request, engine)
    row = policy_row(values["policy"] or DEFAULT_POLICY, timesteps=traits.timesteps and values["entropy_bound"] is None)
    verifier = VERIFIER_ROWS[values["verify"] or "none"]
    editing = values["edit_threshold"] is not None
    if editing and not traits.editing:
        raise not_allowed(
            "edit_threshold",
            values["edit_threshold"],
            f": {traits.family} models do not edit tokens (LLaDA2 models do)",
        )
    denoising_steps = _denoising_steps(values, row, traits, block_length, max_tokens)
    quota, remainder = _quota(values, denoising_steps, engine, traits, block_length)
    subset_match = verifier.name == "freedave" and values["match"] == "subset"
    if verifier.uses_policy:
        _check_alg_temp(request, values, row)
    else:
        _check_fef(request, engine)
    _check_unread(request, row, verifier, editing=editing)
    _check_guidance(values, engine, traits)
    _check_eager(values, engine, counts_steps=row.counts_steps, remainder=remainder, subset_match=subset_match)
    if values["drafts"] == "auto" and (verifier.name == "psd" or subset_match):
        raise not_allowed(
            "drafts",
            "auto",
            " with verify='psd' or match='subset': their tokens depend on the number of drafts, and would change with "
            "the load; give a number",
        )
    window = min(values["window"] or VERIFIER_ROWS["fef"].default_drafts, block_length)
    if verifier.uses_policy:
        num_drafts = count_drafts(verifier, values["drafts"], engine, block_length)
    else:
        num_drafts = count_fef_drafts(request, window, engine, block_length)
    numbers = {**OPTION_DEFAULTS, "threshold": traits.threshold, **row.defaults}
    numbers |= {name: values[name] for name in numbers if values[name] is not None}
    return ResolvedOptions(
        policy=row.name,
        kind=row.kind,
        quota=quota,
        quota_remainder=remainder,
        num_steps=denoising_steps or -(-block_length // quota),
        threshold=numbers["threshold"],
        entropy_bound=numbers["entropy_bound"],
        edit_threshold=values["edit_threshold"] if editing else float("inf"),
        max_post_edit_steps=16 if values["max_post_edit_steps"] is None else values["max_post_edit_steps"],
        relaxed_threshold=numbers["relaxed_threshold"],
        radius=int(numbers["radius"]),
        factor=numbers["factor"],
        alg_temp=numbers["alg_temp"] if row.has_alg_temp else 0.0,
        cfg_scale=values["cfg_scale"] or 0.0,
        confidence_top_k=values["confidence_top_k"],
        verify=verifier.name,
        num_drafts=num_drafts,
        auto_drafts=verifier.uses_policy and values["drafts"] == "auto" and num_drafts > 0,
        window=window,
        resample_steps=values["resample_steps"] or 2,
        remask=values["remask"] or DEFAULT_REMASK,
        subset_match=subset_match,
        eos_early_stop=values["eos_early_stop"] is not False,
    )


def _lay_over(request: DecodingOptions, engine: DllmConfig) -> dict[str, Any]:
    """Every option of a request by its name: the request's value, or the engine's, or ``None``."""
    values: dict[str, Any] = {}
    for name in DecodingOptions.model_fields:
        own = getattr(request, name)
        values[name] = getattr(engine, name) if own is None else own
    # A request that names one of the schedules replaces the engine's, whichever the engine named.
    if any(getattr(request, name) is not None for name in SCHEDULES):
        values |= {name: getattr(request, name) for name in SCHEDULES}
    if request.verify not in (None, engine.verify) and request.drafts is None:
        # The engine's number was meant for another verifier, which may count differently.
        values["drafts"] = None
    return values


def _denoising_steps(
    values: dict[str, Any], row: PolicyRow, traits: FamilyTraits, block_length: int, max_tokens: int | None
) -> int | None:
    """Denoising steps per block, where the user gives them."""
    key = "denoising_steps" if values["steps"] is None else "steps"
    per_block: int | None = values[key]
    if per_block is None:
        return None
    if key == "steps":
        if not traits.sees_whole_text:
            raise not_allowed(
                key,
                values[key],
                f": blocks of {traits.family} models do not begin where the prompt ends; give denoising_steps, which "
                "counts those of a block",
            )
        if max_tokens is None:
            return None
        num_blocks = -(-max_tokens // block_length)
        per_block, rest = divmod(values[key], num_blocks)
        if rest:
            raise not_allowed(
                key,
                values[key],
                f": max_tokens={max_tokens} makes {num_blocks} blocks of {block_length}, and each has as many steps; "
                f"give a multiple of {num_blocks}",
            )
    most = TIMED_STEPS_PER_POSITION * block_length
    if row.timed and per_block > most:
        raise not_allowed(
            key,
            values[key],
            f" with policy={row.name!r}: that makes {per_block} timesteps per block of {block_length}, and there may "
            f"be {most}",
        )
    return per_block


def _quota(
    values: dict[str, Any], steps: int | None, engine: DllmConfig, traits: FamilyTraits, block_length: int
) -> tuple[int, int]:
    """Positions per step, and the number of first steps that unmask one more."""
    if steps is None:
        return values["tokens_per_step"] or 1, 0
    if traits.sees_whole_text and traits.shifted and engine.cache != "none":
        # The refresh at the start of a block is its first step, and decides its first position. The rest is spread over
        # the other steps, one more each in the first of them.
        quota, remainder = divmod(block_length - 1, max(steps - 1, 1))
        return quota, remainder + (remainder > 0)
    return divmod(block_length, steps)


# What a request may not combine.


def _check_alg_temp(request: DecodingOptions, values: dict[str, Any], row: PolicyRow) -> None:
    alg_temp = values["alg_temp"]
    if not alg_temp or row.has_alg_temp:
        return
    if request.alg_temp is None and (request.policy is not None or request.entropy_bound is not None):
        # The engine's was meant for another policy.
        return
    raise not_allowed(
        "alg_temp",
        alg_temp,
        f" with policy={row.name!r}, which does not draw positions by their scores; maskgit_plus and topk_margin do, "
        "and Dream's entropy, without an entropy_bound",
    )


def _check_unread(request: DecodingOptions, row: PolicyRow, verifier: VerifierRow, *, editing: bool) -> None:
    """Refuse options of the request that its policy or verifier does not read. A 0 that turns something off is fine.

    Engine options are defaults for every policy and verifier that a request may choose, so they are not looked at.
    """
    for name in DecodingOptions.model_fields:
        value = getattr(request, name)
        if value is None or (name in ("alg_temp", "drafts") and value == 0):
            continue
        if name in POLICY_OPTIONS and name not in row.options:
            others = (other.name for other in POLICIES if name in other.options and other.name != row.name)
            readers = dict.fromkeys(others)
            where = f"policy={row.name!r}"
        elif name in VERIFIER_OPTIONS and name not in verifier.options:
            readers = dict.fromkeys(other.name for other in VERIFIERS if name in other.options)
            where = f"verify={verifier.name!r}"
        else:
            continue
        raise not_allowed(name, value, f" with {where}, which does not read it; read by {', '.join(readers)}")
    if request.max_post_edit_steps and not editing:
        raise not_allowed(
            "max_post_edit_steps", request.max_post_edit_steps, " without an edit_threshold: no token is edited"
        )


def _check_guidance(values: dict[str, Any], engine: DllmConfig, traits: FamilyTraits) -> None:
    scale = values["cfg_scale"]
    if not scale:
        return
    reason = None
    if not traits.sees_whole_text:
        reason = (
            f"{traits.family} models do not compute their prompt again with every block (it is an option of models "
            "with full attention)"
        )
    elif not engine.has_room_for_guidance:
        reason = "this engine has no room for a second text; start it with the engine option guidance=True"
    elif values["verify"] not in (None, "none"):
        reason = f"it does not go with verify={values['verify']!r}; leave one of them out, or give verify='none'"
    if reason is not None:
        raise not_allowed("cfg_scale", scale, f": {reason}")


def _check_eager(
    values: dict[str, Any], engine: DllmConfig, *, counts_steps: bool, remainder: int, subset_match: bool
) -> None:
    if not engine.eager:
        return
    about_a_block = {
        "edit_threshold": values["edit_threshold"] is not None,
        "denoising_steps": remainder > 0,
        "policy": counts_steps,
    }
    for key, asked in about_a_block.items():
        if asked:
            raise not_allowed(key, values[key], " with the engine option eager: it is about a block at a time")
    if values["verify"] in ("psd", "fef") or subset_match:
        key = "match" if subset_match else "verify"
        raise not_allowed(
            key,
            values[key],
            " with the engine option eager: its tokens depend on when drafts were made, and a request that is "
            "preempted begins the blocks of its window anew",
        )


def _check_fef(request: DecodingOptions, engine: DllmConfig) -> None:
    if engine.refresh_interval is not None:
        raise not_allowed(
            "verify",
            "fef",
            f" with the engine option refresh_interval={engine.refresh_interval!r}: what was drafted before a refresh "
            "could not be verified after it",
        )
    for key in ("policy", *DecodingOptions.model_fields):
        value = getattr(request, key)
        if value is not None and (key in ("policy", "drafts") or key in POLICY_OPTIONS):
            raise not_allowed(
                key,
                value,
                " with verify='fef': it unmasks from left to right, as many positions as it can verify; its own "
                "options are window, resample_steps and remask",
            )
