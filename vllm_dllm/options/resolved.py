"""A request's options as the scheduler and the workers have them: a value each, whoever gave it."""

from dataclasses import dataclass
from typing import Literal

from vllm_dllm.decoding.holes import Holes
from vllm_dllm.methods import BY_KIND, ESTIMATORS, VERIFIER_ROWS, EstimatorName, Policy, RouteName, VerifierName
from vllm_dllm.options.schema import REQUEST_PREFIX

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
    entropy_bound: float
    edit_threshold: float
    """``inf`` when token editing is off."""
    max_post_edit_steps: int
    relaxed_threshold: float
    radius: int
    factor: float
    block_add_threshold: float
    decoded_token_threshold: float
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
    route: RouteName
    min_span: int
    score_threshold: float
    score_on: float
    score_off: float
    score_cost: float
    score_cost_per: Literal["forward", "token"]
    estimator: EstimatorName
    estimator_parameter: float | None
    """``None``: the estimator's own."""
    resample_steps: int
    remask: float
    subset_match: bool
    eos_early_stop: bool
    step_map: bool
    step_events: bool
    infill: bool | Literal["max_tokens"]
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
