"""The output is the target's: greedy token for token, sampled in distribution, whatever drafts and however it does."""

import functools
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from vllm import LLM
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import generate, greedy, tokens_of
from tests.engine.speculators.checkpoints import VOCAB
from tests.engine.speculators.engines import (
    CACHES,
    CONTEXTS,
    EXACT,
    drafted,
    draw,
    engine,
    plain_engine,
    reference_drafter,
    reference_target,
    sampled,
    share_accepted,
    verified,
    with_known_costs,
)
from tests.reference.deer import Round, target_logits
from tests.reference.deer import generate as reference_generate
from vllm_dllm.cpu.rejection import uniform
from vllm_dllm.cpu.sampling import gumbel_noise
from vllm_dllm.versions import draft_step_is_in_seed

MODES = list(itertools.product(CONTEXTS, CACHES))
modes = pytest.mark.parametrize(("context", "cache"), MODES)

SMALL = 8
"""Vocabulary of the tests of distributions: six tokens, mask and separator."""
DRAWS = 2000
LENGTH = 3
"""Tokens whose joint distribution is tested: the target's own first one, and two that may be drafts."""
PROMPT = [1, 5, 2, 6, 3]
NO_SURPRISE = 1e-3
"""Least p-value of a test with fixed seeds."""


def prompts(number: int, longest: int = 40) -> list[list[int]]:
    generator = np.random.default_rng(number)
    lengths = generator.integers(1, longest + 1, number)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


# Greedy.


@functools.cache
def expected_greedily() -> list[list[int]]:
    """The target's own, without a drafter."""
    return [
        tokens_of(output) for output in generate(plain_engine(max_num_seqs=32), prompts(200), greedy(max_tokens=16))
    ]


@modes
def test_greedy_output_of_two_hundred_prompts_is_the_targets(context: str, cache: str) -> None:
    # With other neighbours than without a drafter, and with drafts that are often right and often wrong.
    llm = engine(context, cache, seed=0, max_num_batched_tokens=1024)
    with verified(llm) as rounds:
        outputs = generate(llm, prompts(200), greedy(max_tokens=16))
    assert [tokens_of(output) for output in outputs] == expected_greedily()
    assert 0 < share_accepted(rounds) < 1


@pytest.mark.parametrize(("num_drafts", "max_tokens"), [(1, 16), (24, 16), (24, 5)])
def test_greedy_output_with_one_draft_and_with_more_than_tokens_are_left(num_drafts: int, max_tokens: int) -> None:
    llm = engine("causal", num_drafts=num_drafts, seed=0)
    outputs = generate(llm, prompts(200)[:20], greedy(max_tokens=max_tokens))
    assert [tokens_of(output) for output in outputs] == [tokens[:max_tokens] for tokens in expected_greedily()[:20]]


@modes
def test_greedy_output_with_the_drafters_likeliest_tokens(context: str, cache: str) -> None:
    llm = engine(context, cache, seed=0, speculative={"draft_sample_method": "greedy"})
    with drafted(llm) as seen:
        outputs = generate(llm, prompts(200)[:20], greedy(max_tokens=16))
    assert [tokens_of(output) for output in outputs] == expected_greedily()[:20]
    if (context, cache) in EXACT:
        expected = reference_drafter(context, 4, seed=0)
        assert [round_.drafts for round_ in seen] == [expected.logits(r.text).argmax(-1).tolist() for r in seen]


# Sampled, token for token: the same draws as vLLM's give the same text.


class Keyed:
    """Draws of a request as vLLM keys them: by its seed and the position before the token's.

    From vLLM 0.33 on, draws of drafts are keyed by their number, too.
    """

    DRAFTING = 1 << 30

    def __init__(self, seed: int):
        self.seed = seed

    def draft(self, position: int, number: int, logits: torch.Tensor) -> int:
        seed = self.seed ^ number << 32 if draft_step_is_in_seed() else self.seed
        return self._draw(seed, position + self.DRAFTING, logits)

    def uniform(self, position: int) -> float:
        return uniform(self.seed, position - 1)

    def draw(self, position: int, logits: torch.Tensor) -> int:
        return self._draw(self.seed, position, logits)

    def _draw(self, seed: int, position: int, logits: torch.Tensor) -> int:
        return int((logits.numpy() + gumbel_noise(seed, position - 1, len(logits))).argmax())


@functools.cache
def reference_runs(context: str, temperature: float) -> tuple[list[list[int]], list[list[Round]]]:
    """Tokens and rounds of each prompt."""
    texts, rounds = [], []
    for seed, prompt in enumerate(prompts(10)):
        tokens, own = reference_generate(
            reference_target(), reference_drafter(context, 4, seed=0), prompt, 20, temperature, Keyed(seed)
        )
        texts.append(tokens)
        rounds.append(own)
    return texts, rounds


@pytest.mark.parametrize(("context", "cache"), EXACT)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_drafts_acceptances_and_texts_are_those_of_the_reference(context: str, cache: str, temperature: float) -> None:
    expected, rounds = reference_runs(context, temperature)
    llm = engine(context, cache, seed=0)
    params = [sampled(seed, 20, temperature=temperature) for seed in range(10)]
    with verified(llm) as seen:
        outputs = generate(llm, prompts(10), params)
    assert [tokens_of(output) for output in outputs] == expected
    assert [seen[output.request_id] for output in outputs] == rounds


# Sampled, in distribution.


def likeliest(distributions: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """Distributions ``[n, V]`` as a request asks for them, from logits, in vLLM's order."""
    distributions = (distributions.double() / params.get("temperature", 1.0)).softmax(-1)
    if "top_k" in params:
        kept = distributions.topk(params["top_k"]).indices
        distributions = torch.zeros_like(distributions).scatter(-1, kept, distributions.gather(-1, kept))
        distributions /= distributions.sum(-1, keepdim=True)
    if "top_p" in params:
        descending, order = distributions.sort(-1, descending=True)
        # A token is kept where those before it do not reach top_p.
        kept = descending.cumsum(-1) - descending < params["top_p"]
        distributions = torch.zeros_like(distributions).scatter(-1, order, descending * kept)
    return distributions / distributions.sum(-1, keepdim=True)


def joint_distribution(**params: Any) -> dict[tuple[int, ...], float]:
    """The target's exact distribution of the first tokens."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, probability in distribution.items():
            logits = target_logits(reference_target(SMALL), [*PROMPT, *text], len(PROMPT) + len(text))
            for token, p in enumerate(likeliest(logits, params)[0].tolist()):
                longer[(*text, token)] = probability * p
        distribution = longer
    return distribution


def assert_distribution(drawn: list[list[int]], distribution: dict[tuple[int, ...], float]) -> None:
    """Chi-square of goodness of fit; what is rarely expected counts as one."""
    found = Counter(map(tuple, drawn))
    assert not [text for text in found if distribution[text] == 0]
    often = [text for text, p in distribution.items() if p * len(drawn) >= 5]
    assert len(often) > 5
    observed, expected = [found[text] for text in often], [distribution[text] * len(drawn) for text in often]
    rest = len(drawn) - sum(expected)
    if rest >= 5:
        observed, expected = [*observed, len(drawn) - sum(observed)], [*expected, rest]
    else:
        observed[-1], expected[-1] = observed[-1] + len(drawn) - sum(observed), expected[-1] + rest
    assert stats.chisquare(observed, expected).pvalue > NO_SURPRISE


def small_engine(context: str, cache: str, **speculative: Any) -> LLM:
    """Its drafter has nothing in common with the target but the vocabulary."""
    return engine(
        context,
        cache,
        num_drafts=3,
        vocab=SMALL,
        max_model_len=32,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        speculative=speculative,
    )


@modes
def test_sampled_texts_have_the_targets_joint_distribution(context: str, cache: str) -> None:
    llm = small_engine(context, cache)
    with verified(llm) as rounds:
        drawn = draw(llm, PROMPT, DRAWS, max_tokens=LENGTH)
    assert_distribution(drawn, joint_distribution())
    assert 0.05 < share_accepted(rounds) < 0.8


@pytest.mark.parametrize(
    "speculative",
    [
        {"draft_sample_method": "greedy"},
        {"draft_temperature_factor": 0.3},
        {"adaptive": True},
        {"max_model_len": 7},
    ],
    ids=["greedy-drafts", "colder-drafts", "adaptive", "a-drafter-with-less-context"],
)
def test_sampled_texts_have_the_targets_joint_distribution_with_other_options(speculative: dict[str, Any]) -> None:
    llm = small_engine("causal", "keep", **speculative)
    if "adaptive" in speculative:
        # Rows are so cheap that some of the drafts pay in most rounds.
        with_known_costs(llm, row=0.002)
    with verified(llm) as rounds:
        drawn = draw(llm, PROMPT, DRAWS, max_tokens=LENGTH)
    assert_distribution(drawn, joint_distribution())
    if "adaptive" in speculative:
        drafted = Counter(round_.drafted for own in rounds.values() for round_ in own)
        assert len(drafted) > 1


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 1.7, "top_k": 5, "top_p": 0.9}],
    ids=str,
)
def test_sampled_texts_have_the_distribution_that_a_request_asks_for(params: dict[str, Any]) -> None:
    llm = small_engine("causal", "keep")
    assert_distribution(draw(llm, PROMPT, DRAWS // 2, max_tokens=LENGTH, **params), joint_distribution(**params))


@pytest.mark.parametrize("params", [{"min_p": 0.2}, {"logit_bias": {3: 1.0}}], ids=str)
def test_what_vllm_cannot_verify_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        generate(small_engine("causal", "keep"), [PROMPT], sampled(1, **params))
    with pytest.raises(VLLMValidationError, match="logprob_token_ids is not supported with a diffusion drafter"):
        generate(small_engine("causal", "keep"), [PROMPT], sampled(1, logprob_token_ids=[3]))
    assert len(draw(small_engine("causal", "keep"), PROMPT, 1, max_tokens=LENGTH)[0]) == LENGTH
