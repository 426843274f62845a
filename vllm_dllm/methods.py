"""The table of unmasking policies, and the table of verifiers: all that the package says of one of them by its name.

A policy is added in two places: a row here, and its rule in `vllm_dllm.decoding.policies`. Options, their
refusals, start-up lines, sets of policies and ``docs/options.md`` follow from the row. The tables import nothing of the
package, so that options, algorithms and runtime can all read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

Score = Literal["confidence", "position", "entropy", "margin", "noise"]
"""What a policy orders masked positions by: the probability of the token that a position would get; the position, from
left to right; the entropy of its distribution; the difference of the two largest probabilities; a random number."""

SCHEDULES = ("tokens_per_step", "denoising_steps", "steps")
"""Options that say how many positions a step unmasks; a request gives one of them at most."""


class Policy(IntEnum):
    """Unmasking policy of a request, as the worker stores it."""

    STATIC = 0
    THRESHOLD = 1
    SEQUENTIAL = 2
    ENTROPY = 3
    LOCALLEAP = 4
    FACTOR = 5
    RANDOM = 6
    ORIGIN = 7
    MASKGIT_PLUS = 8
    TOPK_MARGIN = 9
    TIMED_ENTROPY = 10
    PACED = 11
    HIERARCHY = 12
    MULTI_BLOCK = 13


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """One unmasking policy."""

    kind: Policy
    paper: str
    unmasks: str
    """What a step unmasks, for ``docs/options.md``."""
    orders_by: Score = "confidence"
    options: tuple[str, ...] = SCHEDULES
    """Request options that the policy reads, those that every policy reads left out."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults that are not those of ``options.resolved.OPTION_DEFAULTS``."""
    timed: bool = False
    """Goes by a schedule of timesteps, which says what share of the masked positions a step unmasks."""
    paced: bool = False
    """Goes by the positions that are due after so many steps of the block."""
    drawn: bool = False
    """Draws positions by chance, whatever ``alg_temp`` says."""
    needs_windows: bool = False
    """Denoises several blocks at a time, which takes an engine whose windows hold several (``eager``)."""
    judges_positions: bool = False
    """Unmasks positions for what the logits say of each. Other policies only say how many a step unmasks."""

    @property
    def name(self) -> str:
        """What ``dllm_policy`` calls the policy; ``entropy`` is the name of two (`policy_row`)."""
        return self.kind.name.lower().removeprefix("timed_")

    @property
    def counts_steps(self) -> bool:
        """Whether the next state depends on the number of steps that the block has had, not on the state alone."""
        return self.timed or self.paced

    @property
    def has_alg_temp(self) -> bool:
        """Whether ``alg_temp`` may have the order of the positions drawn by their scores."""
        return "alg_temp" in self.options


POLICIES: tuple[PolicyRow, ...] = (
    PolicyRow(kind=Policy.STATIC, paper="LLaDA, SDAR", unmasks="the `tokens_per_step` most confident positions"),
    PolicyRow(
        kind=Policy.THRESHOLD,
        paper="Fast-dLLM, SDAR, LLaDA2",
        unmasks="the `tokens_per_step` most confident positions, and all whose confidence passes `threshold`",
        options=("threshold", *SCHEDULES),
        judges_positions=True,
    ),
    PolicyRow(
        kind=Policy.SEQUENTIAL, paper="SDAR", unmasks="the `tokens_per_step` leftmost positions", orders_by="position"
    ),
    PolicyRow(
        kind=Policy.ENTROPY,
        paper="EB-Sampler",
        unmasks="the most certain positions whose entropies together stay within `entropy_bound`",
        orders_by="entropy",
        options=("entropy_bound",),
        judges_positions=True,
    ),
    PolicyRow(
        kind=Policy.TIMED_ENTROPY,
        paper="Dream",
        unmasks="without an `entropy_bound`: the most certain positions, as many as the timesteps say",
        orders_by="entropy",
        options=("alg_temp", *SCHEDULES),
        timed=True,
    ),
    PolicyRow(
        kind=Policy.LOCALLEAP,
        paper="LocalLeap",
        unmasks="as `threshold`, with `relaxed_threshold` for positions at most `radius` from one that reaches it",
        options=("threshold", "relaxed_threshold", "radius", *SCHEDULES),
        defaults={"threshold": 0.9},
        judges_positions=True,
    ),
    PolicyRow(
        kind=Policy.FACTOR,
        paper="Fast-dLLM",
        unmasks="the n most confident positions while (n + 1)(1 - confidence) stays below `factor`",
        options=("factor",),
        judges_positions=True,
    ),
    PolicyRow(
        kind=Policy.HIERARCHY,
        paper="dInfer",
        unmasks="of each run of masks the most confident position above `relaxed_threshold`, and all above `threshold`",
        options=("threshold", "relaxed_threshold"),
        defaults={"relaxed_threshold": 0.4},
        judges_positions=True,
    ),
    PolicyRow(
        kind=Policy.MULTI_BLOCK,
        paper="D2F",
        unmasks="of several blocks at a time all positions whose confidence passes `threshold`; of a block without any "
        "the most confident one, once `decoded_token_threshold` of the block in front is decoded",
        options=("threshold", "block_add_threshold", "decoded_token_threshold"),
        defaults={"threshold": 0.9},
        needs_windows=True,
        judges_positions=True,
    ),
    PolicyRow(
        kind=Policy.RANDOM, paper="LLaDA", unmasks="`tokens_per_step` drawn positions", orders_by="noise", drawn=True
    ),
    PolicyRow(
        kind=Policy.PACED,
        paper="Dream in Fast-dLLM",
        unmasks="of the positions due by now the most confident, as far as they reach `threshold`, at least one",
        options=("threshold", *SCHEDULES),
        paced=True,
        judges_positions=True,
    ),
    PolicyRow(
        kind=Policy.ORIGIN,
        paper="Dream",
        unmasks="each position with the probability of its timestep",
        orders_by="noise",
        timed=True,
        drawn=True,
    ),
    PolicyRow(
        kind=Policy.MASKGIT_PLUS,
        paper="Dream",
        unmasks="the most confident positions, as many as the timesteps say",
        options=("alg_temp", *SCHEDULES),
        timed=True,
    ),
    PolicyRow(
        kind=Policy.TOPK_MARGIN,
        paper="Dream",
        unmasks="the positions with the largest margin, as many as the timesteps say",
        orders_by="margin",
        options=("alg_temp", *SCHEDULES),
        timed=True,
    ),
)

BY_KIND: Mapping[Policy, PolicyRow] = {row.kind: row for row in POLICIES}

POLICY_OPTIONS = frozenset(name for row in POLICIES for name in row.options)
"""Options that some policies read and others do not."""


ROUTES: Mapping[str, tuple[str, ...]] = {
    "always": (),
    "span": ("min_span",),
    "score": ("score_threshold", "score_cost", "score_cost_per", "estimator", "estimator_parameter"),
    "hysteresis": ("score_on", "score_off", "score_cost", "score_cost_per", "estimator", "estimator_parameter"),
}
"""When S2D2 verifies what it drafted, and the options that each of these rules reads."""

ESTIMATORS: Mapping[str, float] = {
    "soft_entropy_negexp": 1.0,
    "hard_entropy_threshold": 0.5,
    "hard_margin_threshold": 0.05,
    "soft_clipped_linear_margin": 1.0,
    "soft_confidence_power": 1.0,
}
"""How S2D2 guesses that a draft will be accepted (``decoding.s2d2.acceptances``), and the parameter of each guess."""


@dataclass(frozen=True, kw_only=True)
class VerifierRow:
    """One way to skip denoising steps: drafts of later states, verified in the forward that computes the block."""

    name: str
    """What ``dllm_verify`` calls the verifier."""
    paper: str
    default_drafts: int
    """Drafts as the paper counts them; of FeF the window."""
    block_is_a_draft: bool = False
    """The paper's number counts the block itself."""
    options: tuple[str, ...] = ("drafts",)
    """Request options that the verifier reads."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults of a policy's options that are not those of ``options.resolved.OPTION_DEFAULTS``."""
    uses_policy: bool = True
    """A policy chooses the positions; FeF has an order of its own, and ISD drafts all masks in every forward."""
    is_autoregressive: bool = False
    """Decodes what the model writes as an autoregressive one. What a policy or the masks make are drafts of it."""
    needs_all_drafts: bool = False
    """Tokens depend on the number of drafts. A step has all drafts of a request, or the request waits."""
    verifies_causally: bool = False
    """Rows of drafts see only what is before them, and the engine is started with a backend of attention for it."""


VERIFIERS: tuple[VerifierRow, ...] = (
    VerifierRow(name="none", paper="", default_drafts=0, options=()),
    VerifierRow(
        name="freedave", paper="FreeDave", default_drafts=8, block_is_a_draft=True, options=("drafts", "match")
    ),
    VerifierRow(name="spiffy", paper="Spiffy", default_drafts=3),
    VerifierRow(name="psd", paper="PSD", default_drafts=3, needs_all_drafts=True),
    VerifierRow(
        name="fef",
        paper="FeF-DLLM",
        default_drafts=16,
        options=("window", "resample_steps", "remask"),
        uses_policy=False,
        needs_all_drafts=True,
    ),
    VerifierRow(
        name="linear_spec",
        paper="Nemotron-Labs-Diffusion",
        default_drafts=0,
        options=(),
        # One forward drafts the block.
        defaults={"threshold": 0.0},
        is_autoregressive=True,
    ),
    VerifierRow(name="isd", paper="I-DLM", default_drafts=0, options=(), uses_policy=False, is_autoregressive=True),
    VerifierRow(
        name="s2d2",
        paper="S2D2",
        default_drafts=0,
        options=("window", "route", *dict.fromkeys(name for names in ROUTES.values() for name in names)),
        needs_all_drafts=True,
        verifies_causally=True,
    ),
)

VERIFIER_ROWS: Mapping[str, VerifierRow] = {row.name: row for row in VERIFIERS}

VERIFIER_OPTIONS = frozenset(name for row in VERIFIERS for name in row.options)
"""Options that some verifiers read and others do not."""

POLICY_NAMES: tuple[str, ...] = tuple(dict.fromkeys(row.name for row in POLICIES))
VERIFIER_NAMES: tuple[str, ...] = tuple(VERIFIER_ROWS)

if TYPE_CHECKING:
    PolicyName = str
    VerifierName = str
    RouteName = str
    EstimatorName = str
else:  # pydantic and typer read the allowed names from the type
    PolicyName = Literal[POLICY_NAMES]
    VerifierName = Literal[VERIFIER_NAMES]
    RouteName = Literal[tuple(ROUTES)]
    EstimatorName = Literal[tuple(ESTIMATORS)]


def policy_row(name: str, *, timesteps: bool) -> PolicyRow:
    """The row of a policy by its name; of two with that name, the one that goes by timesteps, or the other one."""
    rows = [row for row in POLICIES if row.name == name]
    return next((row for row in rows if row.timed == timesteps), rows[0])
