"""A request's options as the scheduler and the workers have them: a value each, whoever gave it."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from math import inf
from typing import Any, Literal

from vllm_dllm.decoding.holes import Holes
from vllm_dllm.methods import BY_KIND, ESTIMATORS, VERIFIER_ROWS, EstimatorName, Policy, RouteName, VerifierName
from vllm_dllm.options.schema import REQUEST_PREFIX, DecodingOptions

RESOLVED_KEY = REQUEST_PREFIX + "resolved"
"""Key of the resolved options in ``extra_args``. No request may bring it: it is no name of an option."""

PREEMPTED_KEY = REQUEST_PREFIX + "preempted"
"""Key that the scheduler sets in ``extra_args`` of a preempted request whose window the workers keep. No request may
bring it either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedOptions:
    """Options of one request; every field has a value that the scheduler and the worker can use as it is."""

    kind: Policy
    quota: int
    """Positions per step; one more in the first ``quota_remainder`` steps of a block."""
    quota_remainder: int
    num_steps: int
    """Denoising steps of a block, for the policies with a schedule of timesteps."""
    threshold: float
    entropy_bound: float = 0.35
    edit_threshold: float = inf
    """``inf`` when token editing is off."""
    max_post_edit_steps: int = 16
    relaxed_threshold: float = 0.75
    radius: int = 4
    factor: float = 1.0
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    alg_temp: float = 0.0
    cfg_scale: float = 0.0
    """0 when guidance is off."""
    confidence_top_k: int | None = None
    """``None``: confidence, margin and entropy are those of all tokens."""
    verify: VerifierName
    num_drafts: int
    """Drafts beside the block itself, at most."""
    auto_drafts: bool
    """Fewer drafts where they do not pay."""
    window: int
    route: RouteName = "always"
    min_span: int = 8
    score_threshold: float = 0.0
    score_on: float = 1.0
    score_off: float = -5.0
    score_cost: float = 1.0
    score_cost_per: Literal["forward", "token"] = "forward"
    estimator: EstimatorName = "soft_entropy_negexp"
    estimator_parameter: float | None = None
    """``None``: the estimator's own."""
    resample_steps: int = 2
    # FeF-DLLM (arXiv 2605.14305) does not give its n_rm. Its Table 1 gives the time of 2 and of 4 passes: by that a
    # further pass takes 0.46 to 0.54 of the first on each of the four benchmarks, which is the share if every round
    # commits alike.
    remask: float = 0.5
    subset_match: bool
    eos_early_stop: bool = True
    step_map: bool = False
    step_events: bool = False
    infill: bool | Literal["max_tokens"] = False
    structured: bool
    """A grammar constrains the text (structured outputs)."""
    hole_runs: tuple[tuple[int, int], ...] = ()
    """Of ``decoding.holes.Holes``, once the request is admitted; none: the request fills in nothing."""

    @property
    def holes(self) -> Holes | None:
        """What the request fills in; ``None``: it goes on behind its prompt."""
        return Holes(self.hole_runs) if self.hole_runs else None

    @property
    def most_unmasked(self) -> int | None:
        """Positions that a step unmasks at most; ``None``: the logits or a schedule of timesteps decide."""
        row = BY_KIND[self.kind]
        return None if row.judges_positions or row.timed else self.quota + (self.quota_remainder > 0)

    @property
    def policy(self) -> str:
        return BY_KIND[self.kind].name

    @property
    def needs_all_drafts(self) -> bool:
        """Tokens depend on the number of drafts, so load must not take any of them away."""
        return VERIFIER_ROWS[self.verify].needs_all_drafts or self.subset_match

    @property
    def keeps_window(self) -> bool:
        """What the worker knows of the request must outlive a preemption."""
        return BY_KIND[self.kind].needs_windows or (self.verify == "s2d2" and self.route == "hysteresis")

    @property
    def strength(self) -> float:
        """The parameter of the estimator."""
        return ESTIMATORS[self.estimator] if self.estimator_parameter is None else self.estimator_parameter


OPTION_DEFAULTS: Mapping[str, Any] = {
    each.name: each.default
    for each in fields(ResolvedOptions)
    if each.name in DecodingOptions.model_fields and each.default is not MISSING
}
"""Defaults of options that mean the same for all policies, verifiers and families. ``threshold`` is missing: each model
family has its own."""
