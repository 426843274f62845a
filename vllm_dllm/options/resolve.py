"""A request's options laid over the engine's, and the engine's over the model family's: once, when it is admitted.

`vllm_dllm.options.admission` writes the result into the request's ``SamplingParams``, where the scheduler and the
workers find it with `options_of`.
"""

from typing import TYPE_CHECKING, Any

from vllm_dllm.methods import (
    POLICIES,
    POLICY_OPTIONS,
    SCHEDULES,
    VERIFIER_OPTIONS,
    VERIFIER_ROWS,
    VERIFIERS,
    Policy,
    VerifierName,
    policy_row,
)
from vllm_dllm.options.autoregressive import check_autoregressive, check_verifier_of_family
from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.resolution import Resolution
from vllm_dllm.options.resolved import OPTION_DEFAULTS, RESOLVED_KEY, ResolvedOptions
from vllm_dllm.options.schema import MOST_DRAFTS, DecodingOptions, DllmConfig, parse_request_options
from vllm_dllm.options.self_speculation import check_s2d2, default_window, window_drafts
from vllm_dllm.options.windows import check_several_blocks, check_windows
from vllm_dllm.traits import FamilyTraits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_dllm.geometry import Geometry

DEFAULT_POLICY = "threshold"


def options_of(params: "SamplingParams", geometry: "Geometry") -> ResolvedOptions:
    """The resolved options of a request, in the scheduler and in the workers.

    A request that was never admitted, as those of vLLM's warm-up, is resolved here.
    """
    record = (params.extra_args or {}).get(RESOLVED_KEY)
    if record is not None:
        parsed = {"kind": Policy(record["kind"]), "hole_runs": tuple(map(tuple, record["hole_runs"]))}
        return ResolvedOptions(**{**record, **parsed})
    return resolve_request(params, geometry)


def resolve_request(params: "SamplingParams", geometry: "Geometry") -> ResolvedOptions:
    """Resolve what a request asks for.

    Raises:
        OptionError: an option has a wrong name or value, or does not go with the others, the family or the engine.
    """
    constraint = params.structured_outputs
    return resolve(
        parse_request_options(params.extra_args),
        geometry.options,
        geometry.traits,
        geometry.block_length,
        params.max_tokens,
        structured=constraint is not None and not constraint.all_constraints_none(),
    )


def resolve(
    request: DecodingOptions,
    engine: DllmConfig,
    traits: FamilyTraits,
    block_length: int,
    max_tokens: int | None = None,
    *,
    structured: bool = False,
) -> ResolvedOptions:
    """Lay the request's options over the engine's, and those over the family's defaults.

    Args:
        max_tokens: of the request, where it is known: ``steps`` are spread over the blocks that it makes.
        structured: a grammar constrains the request's text.

    Raises:
        OptionError: options that do not go together, or with the family or the engine.
    """
    values = _lay_over(request, engine)
    if structured and traits.verifier is None:
        values = _without_drafts(request, values)
    if values["verify"] == "fef":
        # The engine's are for other verifiers. The request's are refused below.
        values |= {"edit_threshold": request.edit_threshold, "max_post_edit_steps": request.max_post_edit_steps}
    row = policy_row(values["policy"] or DEFAULT_POLICY, timesteps=traits.timesteps and values["entropy_bound"] is None)
    verifier = VERIFIER_ROWS[values["verify"] or traits.verifier or "none"]
    asked = Resolution(request, engine, traits, block_length, max_tokens, values, row, verifier, structured=structured)
    if asked.editing and not traits.editing:
        raise asked.refusal("edit_threshold", f": {traits.family} models do not edit tokens (LLaDA2 models do)")
    quota, remainder = asked.quota
    check_verifier_of_family(asked)
    if verifier.uses_policy:
        _check_alg_temp(asked)
    else:
        _check_without_policy(asked)
    if verifier.is_autoregressive:
        check_autoregressive(asked)
    _check_unread(asked)
    _check_guidance(asked)
    if engine.eager:
        check_windows(asked)
    if verifier.name == "s2d2":
        check_s2d2(asked)
    if row.needs_windows and verifier.uses_policy:
        check_several_blocks(asked)
    if values["drafts"] == "auto" and (verifier.name == "psd" or asked.subset_match):
        raise asked.refusal(
            "drafts",
            " with verify='psd' or match='subset': their tokens depend on the number of drafts, and would change "
            "with the load; give a number",
        )
    window = values["window"] or default_window(verifier, traits, block_length)
    window = min(window, block_length)
    num_drafts = _count_window_drafts(asked, window) if "window" in verifier.options else _count_drafts(asked)
    used = {**OPTION_DEFAULTS, "threshold": traits.threshold, **verifier.defaults, **row.defaults}
    used |= {name: values[name] for name in used if values[name] is not None}
    if not row.has_alg_temp:
        used["alg_temp"] = 0.0
    return ResolvedOptions(
        **used,
        kind=row.kind,
        quota=quota,
        quota_remainder=remainder,
        num_steps=asked.denoising_steps or -(-block_length // quota),
        verify=verifier.name,
        num_drafts=num_drafts,
        auto_drafts=verifier.uses_policy and values["drafts"] == "auto" and num_drafts > 0,
        window=window,
        subset_match=asked.subset_match,
        structured=structured,
    )


def _lay_over(request: DecodingOptions, engine: DllmConfig) -> dict[str, Any]:
    """Every option of a request by its name: the request's value, or the engine's, or ``None``."""
    given = request.model_dump(exclude_none=True)
    values = engine.model_dump(include={*DecodingOptions.model_fields}) | given
    # A request that names one of the schedules replaces the engine's, whichever the engine named.
    if not given.keys().isdisjoint(SCHEDULES):
        values |= {name: given.get(name) for name in SCHEDULES}
    if request.verify not in (None, engine.verify):
        # The engine's numbers were meant for another verifier, which may count differently.
        values |= {name: given.get(name) for name in ("drafts", "window")}
    return values


def _without_drafts(request: DecodingOptions, values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of a request under a grammar, which has drafts of its own, and whose tokens are final.

    Raises:
        OptionError: the request itself asks for other drafts, or for editing.
    """
    reasons = {
        "verify": "the grammar drafts each block itself, from left to right; leave it out, or give 'none'",
        "drafts": "the grammar drafts each block itself; leave it out",
        "edit_threshold": "a token that the grammar has allowed is final",
    }
    for key, reason in reasons.items():
        value = getattr(request, key)
        if value not in (None, "none", 0):
            raise OptionError(f"{key}={value!r} is not allowed with structured outputs: {reason}", key, value)
    return values | {"verify": "none", "drafts": None, "edit_threshold": None}


def drafts_beside_block(verify: VerifierName, drafts: int | None) -> int:
    """Drafts beside the block itself that a verifier's own count of ``drafts`` means."""
    row = VERIFIER_ROWS[verify]
    return max((row.default_drafts if drafts is None else drafts) - row.block_is_a_draft, 0)


# What a request may not combine.


def _check_alg_temp(asked: Resolution) -> None:
    if not asked.values["alg_temp"] or asked.row.has_alg_temp:
        return
    request = asked.request
    if request.alg_temp is None and (request.policy is not None or request.entropy_bound is not None):
        # The engine's was meant for another policy.
        return
    raise asked.refusal(
        "alg_temp",
        f" with policy={asked.row.name!r}, which does not draw positions by their scores; maskgit_plus and "
        "topk_margin do, and Dream's entropy, without an entropy_bound",
    )


_OF_POLICIES = ("policy", "drafts", "edit_threshold", "max_post_edit_steps")
"""Options of a request, beside those of its policy, that nothing reads where no policy chooses positions."""


def _check_without_policy(asked: Resolution) -> None:
    if asked.engine.refresh_interval is not None:
        raise asked.refusal(
            "verify",
            f" with the engine option refresh_interval={asked.engine.refresh_interval!r}: what was drafted before a "
            "refresh could not be verified after it",
        )
    for key in DecodingOptions.model_fields:
        if getattr(asked.request, key) is not None and (key in _OF_POLICIES or key in POLICY_OPTIONS):
            own = ", ".join(asked.verifier.options)
            raise asked.refusal(
                key,
                f" with verify={asked.verifier.name!r}: it goes from left to right, as far as it can verify; "
                + (f"its own options are {own}" if own else "leave it out"),
            )


def _check_unread(asked: Resolution) -> None:
    """Refuse options that the policy or verifier does not read, but for a 0 that turns something off.

    Those of the request alone: engine options are defaults for every policy and verifier that a request may choose.
    """
    for name in DecodingOptions.model_fields:
        value = getattr(asked.request, name)
        if value is None or (name in ("alg_temp", "drafts") and value == 0):
            continue
        if name in POLICY_OPTIONS and name not in asked.row.options:
            readers = [row.name for row in POLICIES if name in row.options and row.name != asked.row.name]
            raise asked.unread(name, f"policy={asked.row.name!r}", readers)
        if name in VERIFIER_OPTIONS and name not in asked.verifier.options:
            readers = [row.name for row in VERIFIERS if name in row.options]
            raise asked.unread(name, f"verify={asked.verifier.name!r}", readers)
    if asked.request.max_post_edit_steps and not asked.editing:
        raise asked.refusal("max_post_edit_steps", " without an edit_threshold: no token is edited")


def _check_guidance(asked: Resolution) -> None:
    if not asked.values["cfg_scale"]:
        return
    reason = None
    if not asked.traits.sees_whole_text:
        reason = (
            f"{asked.traits.family} models do not compute their prompt again with every block (it is an option of "
            "models with full attention)"
        )
    elif not asked.engine.has_room_for_guidance:
        reason = "this engine has no room for a second text; start it with the engine option guidance=True"
    elif asked.verifier.name != "none":
        reason = f"it does not go with verify={asked.verifier.name!r}; leave one of them out, or give verify='none'"
    if reason is not None:
        raise asked.refusal("cfg_scale", f": {reason}")


def _count_drafts(asked: Resolution) -> int:
    """Drafts beside the block; no more than the engine has room for where nobody gives a number."""
    verify, drafts, engine = asked.verifier.name, asked.values["drafts"], asked.engine
    if not asked.verifier.default_drafts:
        return 0
    useful = MOST_DRAFTS
    if not engine.eager and (verify == "freedave" or (verify == "psd" and engine.draft_graph is None)):
        # The block has one token more than nothing, each draft of a chain one more, and the last leaves a mask.
        useful = max(asked.block_length - 2, 0)
    counted = drafts_beside_block(verify, None if drafts == "auto" else drafts)
    wanted = useful if drafts == "auto" else min(counted, useful)
    # While an engine starts, it makes room for what it asks for itself.
    room = counted if engine.max_drafts is None else engine.max_drafts
    if wanted and not room:
        raise asked.refusal(
            "verify",
            ": this engine has no room for drafts; start it with a larger max_drafts, or with verify as an engine "
            "option and no max_drafts",
        )
    if wanted > room and isinstance(drafts, int):
        raise asked.refusal(
            "drafts",
            f": this engine has room for {room + asked.verifier.block_is_a_draft} with verify={verify!r} (engine "
            "option max_drafts)",
        )
    return min(wanted, room)


def _count_window_drafts(asked: Resolution, window: int) -> int:
    """Drafts beside the block. A refusal names what the user can change: the request's ``window``, if given."""
    verify = asked.verifier.name
    wanted = window_drafts(asked.verifier, window, asked.traits, asked.block_length)
    room = wanted if asked.engine.max_drafts is None else asked.engine.max_drafts
    if wanted <= room:
        return wanted
    has = f"room for {room}" if room else "no room for drafts"
    needs = f"needs room for {wanted} drafts, and this engine has {has}"
    fits = room + (verify == "fef")
    remedy = f"start the engine with max_drafts={wanted}" + (f", or ask for a window of {fits}" if room else "")
    if asked.request.window is not None and room:
        raise asked.refusal("window", f": verify={verify!r} {needs}; {remedy}")
    raise asked.refusal("verify", f": a window of {window} {needs}; {remedy}")
