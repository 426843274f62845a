"""A request's options laid over the engine's, and the engine's over the model family's: once, when it is admitted.

`vllm_dllm.options.admission` writes the result into the request's ``SamplingParams``, where the scheduler and the
workers find it with `options_of`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_dllm.methods import (
    OPTION_DEFAULTS,
    POLICIES,
    POLICY_OPTIONS,
    SCHEDULES,
    VERIFIER_OPTIONS,
    VERIFIER_ROWS,
    VERIFIERS,
    Policy,
    PolicyRow,
    VerifierName,
    VerifierRow,
    policy_row,
)
from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.resolved import RESOLVED_KEY, ResolvedOptions
from vllm_dllm.options.schema import MOST_DRAFTS, DecodingOptions, DllmConfig, parse_request_options
from vllm_dllm.options.self_speculation import default_window, refused_to_s2d2, window_drafts
from vllm_dllm.options.windows import refused_in_windows, refused_to_several_blocks
from vllm_dllm.traits import FamilyTraits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_dllm.geometry import Geometry

DEFAULT_POLICY = "threshold"

TIMED_STEPS_PER_POSITION = 8
"""Most timesteps of a block for each of its positions. With more timesteps most would unmask nothing."""


def options_of(params: "SamplingParams | None", geometry: "Geometry") -> ResolvedOptions:
    """The resolved options of a request, in the scheduler and in the workers.

    A request that was never admitted, as those of vLLM's warm-up, is resolved here.
    """
    record = None if params is None else (params.extra_args or {}).get(RESOLVED_KEY)
    if record is not None:
        parsed = {"kind": Policy(record["kind"]), "hole_runs": tuple(map(tuple, record["hole_runs"]))}
        return ResolvedOptions(**{**record, **parsed})
    return resolve_request(params, geometry)


def resolve_request(params: "SamplingParams | None", geometry: "Geometry") -> ResolvedOptions:
    """Resolve what a request asks for.

    Raises:
        OptionError: an option has a wrong name or value, or does not go with the others, the family or the engine.
    """
    extra_args, max_tokens = (None, None) if params is None else (params.extra_args, params.max_tokens)
    constraint = None if params is None else params.structured_outputs
    return resolve(
        parse_request_options(extra_args),
        geometry.options,
        geometry.traits,
        geometry.block_length,
        max_tokens,
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
    if structured:
        values = _without_drafts(request, values)
    row = policy_row(values["policy"] or DEFAULT_POLICY, timesteps=traits.timesteps and values["entropy_bound"] is None)
    return _Resolution(
        request,
        engine,
        traits,
        block_length,
        max_tokens,
        values,
        row,
        VERIFIER_ROWS[values["verify"] or "none"],
        structured,
    ).resolved()


def _lay_over(request: DecodingOptions, engine: DllmConfig) -> dict[str, Any]:
    """Every option of a request by its name: the request's value, or the engine's, or ``None``."""
    given = request.model_dump(exclude_none=True)
    values = engine.model_dump(include={*DecodingOptions.model_fields}) | given
    # A request that names one of the schedules replaces the engine's, whichever the engine named.
    if not given.keys().isdisjoint(SCHEDULES):
        values |= {name: given.get(name) for name in SCHEDULES}
    if request.verify not in (None, engine.verify) and request.drafts is None:
        # The engine's number was meant for another verifier, which may count differently.
        values["drafts"] = None
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


@dataclass(frozen=True)
class _Resolution:
    """What a request's options are resolved from. Methods raise ``OptionError`` for what does not go together."""

    request: DecodingOptions
    engine: DllmConfig
    traits: FamilyTraits
    block_length: int
    max_tokens: int | None
    values: dict[str, Any]
    """Every option of a request by its name, of ``_lay_over``."""
    row: PolicyRow
    verifier: VerifierRow
    structured: bool

    def refusal(self, key: str, reason: str) -> OptionError:
        """The error of an option that may not have its value for this reason."""
        value = self.values[key]
        return OptionError(f"{key}={value!r} is not allowed{reason}", key, value)

    @property
    def editing(self) -> bool:
        return self.values["edit_threshold"] is not None

    @property
    def subset_match(self) -> bool:
        return self.verifier.name == "freedave" and self.values["match"] == "subset"

    @cached_property
    def denoising_steps(self) -> int | None:
        """Denoising steps per block, where the user gives them."""
        key = "denoising_steps" if self.values["steps"] is None else "steps"
        per_block: int | None = self.values[key]
        if per_block is None:
            return None
        if key == "steps":
            if not self.traits.sees_whole_text:
                raise self.refusal(
                    key,
                    f": blocks of {self.traits.family} models do not begin where the prompt ends; give "
                    "denoising_steps, which counts those of a block",
                )
            if self.max_tokens is None:
                return None
            num_blocks = -(-self.max_tokens // self.block_length)
            per_block, rest = divmod(per_block, num_blocks)
            if rest:
                raise self.refusal(
                    key,
                    f": max_tokens={self.max_tokens} makes {num_blocks} blocks of {self.block_length}, and each has as "
                    f"many steps; give a multiple of {num_blocks}",
                )
        most = TIMED_STEPS_PER_POSITION * self.block_length
        if self.row.timed and per_block > most:
            raise self.refusal(
                key,
                f" with policy={self.row.name!r}: that makes {per_block} timesteps per block of {self.block_length}, "
                f"and there may be {most}",
            )
        return per_block

    @cached_property
    def quota(self) -> tuple[int, int]:
        """Positions per step, and the number of first steps that unmask one more."""
        steps = self.denoising_steps
        if steps is None:
            return self.values["tokens_per_step"] or 1, 0
        if self.traits.sees_whole_text and self.traits.shifted and self.engine.cache != "none":
            # The refresh at the start of a block is its first step, and decides its first position. The rest is spread
            # over the other steps, one more each in the first of them.
            quota, remainder = divmod(self.block_length - 1, max(steps - 1, 1))
            return quota, remainder + (remainder > 0)
        return divmod(self.block_length, steps)

    def resolved(self) -> ResolvedOptions:
        values, row, verifier = self.values, self.row, self.verifier
        if self.editing and not self.traits.editing:
            raise self.refusal("edit_threshold", f": {self.traits.family} models do not edit tokens (LLaDA2 models do)")
        quota, remainder = self.quota
        if verifier.uses_policy:
            self.check_alg_temp()
        else:
            self.check_fef()
        if verifier.is_autoregressive:
            self.check_autoregressive()
        self.check_unread()
        self.check_guidance()
        self.check_windows()
        if values["drafts"] == "auto" and (verifier.name == "psd" or self.subset_match):
            raise self.refusal(
                "drafts",
                " with verify='psd' or match='subset': their tokens depend on the number of drafts, and would change "
                "with the load; give a number",
            )
        window = values["window"] or default_window(verifier, self.traits, self.block_length)
        window = min(window, self.block_length)
        num_drafts = self.count_window_drafts(window) if "window" in verifier.options else self.count_drafts()
        used = {**OPTION_DEFAULTS, "threshold": self.traits.threshold, **verifier.defaults, **row.defaults}
        used |= {name: values[name] for name in used if values[name] is not None}
        if not row.has_alg_temp:
            used["alg_temp"] = 0.0
        return ResolvedOptions(
            **used,
            kind=row.kind,
            quota=quota,
            quota_remainder=remainder,
            num_steps=self.denoising_steps or -(-self.block_length // quota),
            verify=verifier.name,
            num_drafts=num_drafts,
            auto_drafts=verifier.uses_policy and values["drafts"] == "auto" and num_drafts > 0,
            window=window,
            subset_match=self.subset_match,
            structured=self.structured,
        )

    # What a request may not combine.

    def check_alg_temp(self) -> None:
        if not self.values["alg_temp"] or self.row.has_alg_temp:
            return
        request = self.request
        if request.alg_temp is None and (request.policy is not None or request.entropy_bound is not None):
            # The engine's was meant for another policy.
            return
        raise self.refusal(
            "alg_temp",
            f" with policy={self.row.name!r}, which does not draw positions by their scores; maskgit_plus and "
            "topk_margin do, and Dream's entropy, without an entropy_bound",
        )

    def check_autoregressive(self) -> None:
        """LinearSpec: the model has an autoregressive mode, and the drafts of a block can be counted."""
        reason = None
        if self.engine.first_token == "denoised":
            reason = " with the engine option first_token='denoised'; allowed: 'autoregressive'"
        elif not self.traits.may_denoise_first_tokens:
            reason = (
                f": {self.traits.family} models do not decode a text from left to right as well (it is an option of "
                "Nemotron-Labs-Diffusion models)"
            )
        elif self.block_length > MOST_DRAFTS + 1:
            reason = f" with block_length={self.block_length}: a block may have {MOST_DRAFTS + 1} positions at most"
        if reason is not None:
            raise self.refusal("verify", reason)
        for name in ("step_map", "step_events"):
            if self.values[name]:
                raise self.refusal(name, f" with verify={self.verifier.name!r}: no denoising step writes its tokens")

    def check_fef(self) -> None:
        if self.engine.refresh_interval is not None:
            raise self.refusal(
                "verify",
                f" with the engine option refresh_interval={self.engine.refresh_interval!r}: what was drafted before a "
                "refresh could not be verified after it",
            )
        for key in DecodingOptions.model_fields:
            if getattr(self.request, key) is not None and (key in ("policy", "drafts") or key in POLICY_OPTIONS):
                raise self.refusal(
                    key,
                    " with verify='fef': it unmasks from left to right, as many positions as it can verify; its own "
                    "options are window, resample_steps and remask",
                )

    def check_unread(self) -> None:
        """Refuse options that the policy or verifier does not read, but for a 0 that turns something off.

        Those of the request alone: engine options are defaults for every policy and verifier that a request may choose.
        """
        for name in DecodingOptions.model_fields:
            value = getattr(self.request, name)
            if value is None or (name in ("alg_temp", "drafts") and value == 0):
                continue
            if name in POLICY_OPTIONS and name not in self.row.options:
                readers = [row.name for row in POLICIES if name in row.options and row.name != self.row.name]
                where = f"policy={self.row.name!r}"
            elif name in VERIFIER_OPTIONS and name not in self.verifier.options:
                readers = [row.name for row in VERIFIERS if name in row.options]
                where = f"verify={self.verifier.name!r}"
            else:
                continue
            readers = list(dict.fromkeys(readers))
            raise self.refusal(name, f" with {where}, which does not read it; read by {', '.join(readers)}")
        if self.request.max_post_edit_steps and not self.editing:
            raise self.refusal("max_post_edit_steps", " without an edit_threshold: no token is edited")

    def check_guidance(self) -> None:
        if not self.values["cfg_scale"]:
            return
        reason = None
        if not self.traits.sees_whole_text:
            reason = (
                f"{self.traits.family} models do not compute their prompt again with every block (it is an option of "
                "models with full attention)"
            )
        elif not self.engine.has_room_for_guidance:
            reason = "this engine has no room for a second text; start it with the engine option guidance=True"
        elif self.verifier.name != "none":
            reason = f"it does not go with verify={self.verifier.name!r}; leave one of them out, or give verify='none'"
        if reason is not None:
            raise self.refusal("cfg_scale", f": {reason}")

    def check_windows(self) -> None:
        """Windows of several blocks: what does not go with them, and what does not go without."""
        refused = None
        if self.engine.eager:
            steps_differ = self.quota[1] > 0
            refused = refused_in_windows(self.row, self.verifier, self.editing, steps_differ, self.subset_match)
        if refused is None and self.verifier.name == "s2d2":
            refused = refused_to_s2d2(self.request, self.values, self.row, self.traits, self.engine, self.quota)
        if refused is None and self.row.needs_windows and self.verifier.uses_policy:
            refused = refused_to_several_blocks(
                self.row, self.verifier, self.traits, bool(self.engine.eager), self.structured
            )
        if refused is not None:
            raise self.refusal(*refused)

    def count_drafts(self) -> int:
        """Drafts beside the block; no more than the engine has room for where nobody gives a number."""
        verify, drafts, engine = self.verifier.name, self.values["drafts"], self.engine
        if not self.verifier.default_drafts:
            return 0
        useful = MOST_DRAFTS
        if not engine.eager and (verify == "freedave" or (verify == "psd" and engine.draft_graph is None)):
            # The block has one token more than nothing, each draft of a chain one more, and the last leaves a mask.
            useful = max(self.block_length - 2, 0)
        counted = drafts_beside_block(verify, None if drafts == "auto" else drafts)
        wanted = useful if drafts == "auto" else min(counted, useful)
        # While an engine starts, it makes room for what it asks for itself.
        room = counted if engine.max_drafts is None else engine.max_drafts
        if wanted and not room:
            raise self.refusal(
                "verify",
                ": this engine has no room for drafts; start it with max_drafts, or with verify as an engine option",
            )
        if wanted > room and isinstance(drafts, int):
            raise self.refusal(
                "drafts",
                f": this engine has room for {room + self.verifier.block_is_a_draft} with verify={verify!r} (engine "
                "option max_drafts)",
            )
        return min(wanted, room)

    def count_window_drafts(self, window: int) -> int:
        """Drafts beside the block. A refusal names what the user can change: the request's ``window``, if given."""
        verify = self.verifier.name
        wanted = window_drafts(self.verifier, window, self.traits, self.block_length)
        room = wanted if self.engine.max_drafts is None else self.engine.max_drafts
        if wanted <= room:
            return wanted
        has = f"room for {room}" if room else "no room for drafts"
        needs = f"needs room for {wanted} drafts, and this engine has {has}"
        fits = room + (verify == "fef")
        remedy = f"start the engine with max_drafts={wanted}" + (f", or ask for a window of {fits}" if room else "")
        if self.request.window is not None and room:
            raise self.refusal("window", f": verify={verify!r} {needs}; {remedy}")
        raise self.refusal("verify", f": a window of {window} {needs}; {remedy}")
