"""Step-skipping: which policies are measured under which verifiers, at which load, and how often."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_dllm.methods import VERIFIER_ROWS, PolicyName, VerifierName

POLICIES: dict[str, dict[str, PolicyName | int | float]] = {
    "static, k=1": {"dllm_policy": "static", "dllm_tokens_per_step": 1},
    "threshold 0.9": {"dllm_policy": "threshold", "dllm_threshold": 0.9},
    "localleap": {"dllm_policy": "localleap"},
    "entropy": {"dllm_policy": "entropy"},
    "sequential": {"dllm_policy": "sequential", "dllm_tokens_per_step": 1},
}
"""Request options of each policy."""

STATIC, THRESHOLD, LOCALLEAP = "static, k=1", "threshold 0.9", "localleap"

Drafts = int | Literal["auto"]


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        drafts: as the verifier's paper counts them.
    """

    policy: str
    verify: VerifierName = "none"
    drafts: Drafts = 0
    match: Literal["exact", "subset"] = "exact"

    @property
    def name(self) -> str:
        """Of the verifier with its number of drafts."""
        if self.verify == "none":
            return "none"
        # As the papers write it.
        sign = "D*" if self.verify == "spiffy" else "d"
        return f"{self.verify} {sign}={self.drafts}" + (", subset" if self.match == "subset" else "")

    @property
    def alone(self) -> "Setting":
        """The same policy without drafts."""
        return Setting(self.policy)

    @property
    def lossless(self) -> bool:
        """Whether the verifier promises the policy's own tokens."""
        return self.verify != "psd" and self.match == "exact"

    def extra_args(self) -> dict[str, str | int | float]:
        """As options of a request."""
        options = {**POLICIES[self.policy], "dllm_verify": self.verify}
        if self.verify != "none":
            options |= {"dllm_drafts": self.drafts}
        if self.match != "exact":
            options |= {"dllm_match": self.match}
        return options


MAX_DRAFTS = 10
"""Of Spiffy's D* = 10, the most that is measured."""

DRAFTS: dict[VerifierName, tuple[int, ...]] = {
    "freedave": (1, 3, 5, 7, 8),
    "spiffy": (1, 3, 5, 7, 10),
    "psd": (1, 3, 5, 7),
}
QUICK_DRAFTS: dict[VerifierName, tuple[int, ...]] = {"freedave": (8,), "spiffy": (3,), "psd": (3, 7)}

AUTO_POLICIES = (STATIC, THRESHOLD)
AUTO_VERIFIERS: tuple[VerifierName, ...] = ("freedave", "spiffy")
AUTO_CONCURRENCY = 64
TURNS = {1: 8, AUTO_CONCURRENCY: 7}
"""Where ``auto`` has a target, by concurrency, and for each repetition how often it takes turns with its rival."""
LONGER = {STATIC: 1, THRESHOLD: 2}
"""As many times the problems of a timing in such a turn: a policy with fewer forwards is done too soon to tell some
percent from noise."""

SUBSET = Setting(THRESHOLD, "freedave", 8, "subset")
LOW_PRECISION: list[Setting] = [
    setting
    for policy in (STATIC, THRESHOLD)
    for setting in (Setting(policy), Setting(policy, "freedave", 8), Setting(policy, "spiffy", 3))
]
OVERHEAD_DRAFTS = 3
OVERHEAD_VERIFIERS: dict[VerifierName, int] = {
    "freedave": OVERHEAD_DRAFTS + 1,
    "spiffy": OVERHEAD_DRAFTS,
    "psd": OVERHEAD_DRAFTS,
}
"""``drafts`` that each verifier calls so many drafts beside the block."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        settings: whose quality is measured.
        timed: settings whose speed is measured at a concurrency.
        requests: problems of the quality.
        timed_requests: problems of a timing, by concurrency.
        repetitions: of a timing.
        overhead_requests: of each of the random model's runs.
    """

    settings: list[Setting]
    timed: dict[int, list[Setting]]
    requests: int
    timed_requests: dict[int, int]
    repetitions: int
    overhead_requests: int

    @property
    def duels(self) -> list[tuple[Setting, int, int, int]]:
        """What takes turns with its rival: ``auto`` of a kind, concurrency, problems, turns."""
        return [
            (setting, concurrency, self.timed_requests[concurrency] * LONGER[setting.policy], turns * self.repetitions)
            for concurrency, turns in TURNS.items()
            for setting in self.timed[concurrency]
            if setting.drafts == "auto"
        ]


def make_plan(policies: Sequence[str], *, quick: bool, requests: int, repetitions: int) -> Plan:
    """Everything, or enough to see that it works."""
    settings: list[Setting] = []
    for policy in policies:
        settings.append(Setting(policy))
        for verify, numbers in (QUICK_DRAFTS if quick else DRAFTS).items():
            settings += [Setting(policy, verify, drafts) for drafts in numbers]
            if policy in AUTO_POLICIES and verify in AUTO_VERIFIERS:
                settings.append(Setting(policy, verify, "auto"))
        if policy == SUBSET.policy:
            settings.append(SUBSET)
    loaded = [setting for setting in settings if _shows_load(setting)]
    return Plan(
        settings=settings,
        timed={1: settings, 16: settings, AUTO_CONCURRENCY: loaded},
        requests=requests,
        # Some multiple of the concurrency: the last requests of a run leave the batch half empty.
        timed_requests={1: 4, 16: 16, 64: 64} if quick else {1: 16, 16: 64, 64: 256},
        repetitions=repetitions,
        overhead_requests=1 if quick else 4,
    )


def _shows_load(setting: Setting) -> bool:
    """``auto``, and what it is to be compared with: no drafts, and the verifier's default number of them."""
    return (
        setting.policy in AUTO_POLICIES
        and setting.match == "exact"
        and setting.verify in ("none", *AUTO_VERIFIERS)
        and setting.drafts in ("auto", VERIFIER_ROWS[setting.verify].default_drafts)
    )
