"""The golden data of S2D2 in this project's terms: the published code's runs on tiny models.

``load_s2d2()`` gives the cases that ``s2d2.decode`` must reproduce, with the draws that were put in the place of the
published code's random ones; ``S2D2Golden.skipped`` says why the others are not among them.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.paths import BUNDLED, GOLDEN

from .decode import Options
from .golden import read_cases
from .s2d2 import Rule

FAMILIES = ("sdar", "sdar_tiny", "fast_dllm_v2", "llada2_moe")

UNSUPPORTED = {
    "legacy_ssd_span_strategy": "the older rule of the span's length",
    "ssd_ratio_threshold": "accepts drafts behind a rejected one (not speculative sampling)",
    "always_check_high_confidence": "unmasks positions behind the span beside the verification",
    "use_block_cache": "caches inside the block, which is an approximation",
}
"""Options of the published code that ours has not."""


@dataclass(frozen=True, kw_only=True)
class S2D2Case:
    """One run of the published code.

    Attributes:
        tokens: what it returned, which LLaDA2 cuts at the first stop token.
        drafts, verifications: its forwards that drafted or verified.
        spans, accepted: of every verification: first position and length, and how many drafts were accepted.
        draws: of every verification: the u of its positions, and the r of a replacement; None: the most likely one.
        is_greedy: the verifier's distribution is one-hot, so the draws decide nothing.
    """

    name: str
    family: str
    checkpoint: Path
    prompt: list[int]
    max_new_tokens: int
    options: Options
    rule: Rule
    tokens: list[int]
    drafts: int
    verifications: int
    spans: list[tuple[int, int]]
    accepted: list[int]
    scores: list[float]
    draws: list[tuple[list[float], float | None]]
    temperature: float
    top_p: float
    tempering: float
    is_greedy: bool


@dataclass(frozen=True)
class S2D2Golden:
    cases: list[S2D2Case]
    skipped: dict[str, str]


class OfficialDraws:
    """The published acceptance at temperature 0: the draft is the most likely token, and p its softmax probability."""

    def __init__(self, case: S2D2Case) -> None:
        self.case, self.draws = case, iter(case.draws)
        self.asked: list[tuple[list[Tensor], list[Tensor], list[int], list[float], float | None]] = []

    def distribution(self, logits: Tensor) -> Tensor:
        """Of the tokens that make up ``top_p``: what the verifier says, and what the estimators take."""
        probability = (logits / self.case.temperature).softmax(dim=0)
        if self.case.top_p < 1:
            values, order = probability.sort(descending=True)
            kept = values.cumsum(dim=0) - values <= self.case.top_p
            probability = torch.zeros_like(probability).scatter(0, order, values * kept)
        return probability / probability.sum()

    def __call__(self, drafted: list[Tensor], verified: list[Tensor], tokens: list[int]) -> tuple[int, int | None]:
        uniform, r = next(self.draws)
        for index, token in enumerate(tokens):
            q, p = self.distribution(verified[index]), float(drafted[index].softmax(dim=0)[token])
            ratio = min(1.0, (float(q[token]) / max(p, 1e-12)) ** self.case.tempering)
            if uniform[index] < ratio:
                continue
            excess = (q - (drafted[index] / self.case.temperature).softmax(dim=0)).clamp(min=0)
            excess = q if excess.sum() == 0 else excess
            if r is None:
                return index, int(excess.argmax())
            cumulative = (excess.double() / excess.double().sum()).cumsum(dim=0)
            return index, int((cumulative > r).int().argmax())
        return len(tokens), None


@functools.cache
def load_s2d2(folder: Path = GOLDEN) -> S2D2Golden:
    """Golden data of all families.

    Raises:
        FileNotFoundError: the golden data is not there.
    """
    cases, skipped = [], {}
    for family in FAMILIES:
        for raw in read_cases(folder / "s2d2" / family):
            converted = _case(raw, family, folder)
            name = f"{family}/{raw['name']}"
            if isinstance(converted, str):
                skipped[name] = converted
            else:
                cases.append(converted)
    return S2D2Golden(cases, skipped)


def _case(raw: dict[str, Any], family: str, folder: Path) -> S2D2Case | str:
    kwargs = raw["kwargs"]
    for option, reason in UNSUPPORTED.items():
        if kwargs.get(option):
            return reason
    if kwargs.get("do_verify_policy") == "contextual_bandit_ucb":
        return "routes by a contextual bandit"
    if not kwargs.get("allow_resample", True):
        return "keeps or drops a rejected draft instead of replacing it (not speculative sampling)"
    length = kwargs.get("block_length", kwargs.get("block_size"))
    if kwargs.get("denoising_steps", length) != length:
        return "steps unmask several positions at least, behind a verification too"
    # Fast-dLLM v2's are counted from the sub-block's start, and SDAR stores blocks as they were drafted.
    are_the_papers = kwargs.get("small_block_size") == length if family == "fast_dllm_v2" else kwargs.get("cache_ver")
    if kwargs.get("draft_ver") and not are_the_papers:
        return "draft_ver whose causal rows are others than the paper's"
    greedy = "greedy" in raw["name"]
    verifications = [each for each in raw["verifications"] if each is not None]
    constant = raw["draws"].get("u")
    draws = [
        ([constant] * each["span"][1] if constant is not None else each["u"], each.get("r")) for each in verifications
    ]
    checkpoint = raw["checkpoint"].removeprefix("golden/")
    path = folder / (checkpoint if "/" in checkpoint else f"s2d2/{family}/{checkpoint}")
    if family == "sdar_tiny":
        path = BUNDLED / "s2d2" / "sdar_tiny" / "checkpoint"
    return S2D2Case(
        name=raw["name"],
        family=family,
        checkpoint=path,
        prompt=raw["prompt_token_ids"],
        max_new_tokens=kwargs["gen_length"] if family == "llada2_moe" else len(raw["output_token_ids"]),
        options=_options(raw, family),
        rule=_rule(kwargs),
        tokens=raw["output_token_ids"],
        drafts=raw["nfe_denoise"],
        verifications=raw["nfe_verify"],
        spans=[tuple(each["span"]) for each in verifications],
        accepted=[each["accepted"] for each in verifications],
        scores=[score for score in raw.get("scores") or () if score is not None],
        draws=draws,
        temperature=kwargs["temperature"] or 1.0,
        top_p=kwargs.get("top_p", 1.0),
        tempering=kwargs.get("ssd_ratio_tempering_factor", 1.0),
        is_greedy=greedy,
    )


def _options(raw: dict[str, Any], family: str) -> Options:
    kwargs = raw["kwargs"]
    if family.startswith("sdar"):
        return Options(
            block_length=kwargs["block_length"],
            mask_id=kwargs["mask_id"],
            policy={
                "sequential": "sequential",
                "low_confidence_static": "static",
                "low_confidence_dynamic": "threshold",
            }[kwargs["remasking_strategy"]],
            threshold=kwargs["confidence_threshold"],
            stop_ids=frozenset(kwargs.get("stopping_criteria_idx") or ()),
        )
    if family == "fast_dllm_v2":
        return Options(
            block_length=kwargs["block_size"],
            mask_id=kwargs["mask_id"],
            threshold=kwargs["threshold"],
            sub_block_length=kwargs["small_block_size"],
            shifted=True,
            stop_ids=frozenset({kwargs["stop_token"]}),
            eos_early_stop=True,
        )
    return Options(
        block_length=kwargs["block_length"],
        mask_id=kwargs["mask_id"],
        threshold=kwargs["threshold"],
        edit_threshold=kwargs["editing_threshold"],
        max_post_edit_steps=kwargs.get("max_post_steps", 16),
        stop_ids=frozenset({kwargs["eos_id"]} if kwargs.get("eos_early_stop") else ()),
    )


def _rule(kwargs: dict[str, Any]) -> Rule:
    route = {"score_threshold": "score", "score_hysteresis": "hysteresis"}.get(
        kwargs.get("do_verify_policy", ""), "span"
    )
    estimator = kwargs.get("token_acceptance_estimator", "hard_margin_threshold")
    number = {
        "soft_entropy_negexp": kwargs.get("ssd_entropy_temperature", 1.0),
        "hard_entropy_threshold": kwargs.get("ssd_entropy_threshold", 0.5),
        "hard_margin_threshold": kwargs.get("ssd_confidence_margin_threshold", 0.05),
        "soft_clipped_linear_margin": kwargs.get("ssd_confidence_margin_coef", 1.0),
        "soft_confidence_power": kwargs.get("ssd_confidence_power", 1.0),
    }.get(estimator, math.nan)
    return Rule(
        route=route,  # type: ignore[arg-type]
        min_span=kwargs.get("min_ssd_span_length", 1),
        score_threshold=kwargs.get("do_verify_score_threshold", -1.0),
        score_on=kwargs.get("hysteresis_threshold_on", 0.0),
        score_off=kwargs.get("hysteresis_threshold_off", -1.0),
        score_cost=kwargs.get("score_penalty_coef", 2.0),
        score_cost_per="token"
        if kwargs.get("do_verify_score_type", "difference_dynamic")[-7:] == "dynamic"
        else "forward",
        estimator=estimator,
        number=number,
        causal_cache=kwargs.get("cache_ver", False),
        causal_drafts=kwargs.get("draft_ver", False),
    )
