"""Sampling: the distribution of what is drawn, and that a draw is the request's own."""

import pytest
import torch
from scipy import stats
from vllm import LLM, SamplingParams

from tests.engine.harness import MASK, engine_of, generate, reference_model, tokens_of
from tests.reference.decode import Options
from tests.reference.model import block_causal

PROMPT = [354, 206, 479, 4, 198, 387, 187, 162, 24]
DRAWS = 3000


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine_of("sdar", Options(block_length=4, mask_id=MASK), max_num_seqs=128)


def sampled(**params: object) -> SamplingParams:
    return SamplingParams(detokenize=False, ignore_eos=True, **params)


def first_token_distribution(
    temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Probabilities of the token behind the prompt when it is drawn first, by the plain reference."""
    block = torch.full((12,), MASK)
    block[: len(PROMPT)] = torch.tensor(PROMPT)
    logits = reference_model("sdar")(block, block_causal(12, 4))[len(PROMPT)].double() / temperature
    logits[MASK] = -torch.inf
    if min_p:
        logits[logits.softmax(0) < min_p * logits.softmax(0).max()] = -torch.inf
    if top_k:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    probabilities, order = logits.softmax(0).sort(descending=True)
    keep = probabilities.cumsum(0) - probabilities < top_p
    distribution = torch.zeros_like(logits)
    distribution[order[keep]] = probabilities[keep]
    return distribution / distribution.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 2.0, "top_k": 8},
        {"temperature": 2.0, "top_p": 0.6},
        {"temperature": 2.0, "min_p": 0.05},
    ],
    ids=lambda params: "-".join(f"{k}{v}" for k, v in params.items()),
)
def test_drawn_tokens_follow_the_distribution_of_the_sampling_parameters(llm: LLM, params: dict[str, float]) -> None:
    args = {"dllm_policy": "sequential"}
    requests = [sampled(**params, seed=seed, max_tokens=1, extra_args=args) for seed in range(DRAWS)]
    drawn = torch.tensor([tokens_of(output)[0] for output in generate(llm, [PROMPT] * DRAWS, requests)])
    observed = drawn.bincount(minlength=512).double()
    expected = first_token_distribution(**params) * DRAWS
    assert observed[expected == 0].sum() == 0
    frequent = expected >= 5
    rest = (expected[~frequent].sum(), observed[~frequent].sum())
    counts, means = observed[frequent].tolist(), expected[frequent].tolist()
    if rest[0] > 0:
        counts, means = [*counts, float(rest[1])], [*means, float(rest[0])]
    assert len(counts) > 2
    assert stats.chisquare(counts, means).pvalue > 1e-4


def test_a_seeded_request_draws_the_same_alone_and_in_any_batch(llm: LLM) -> None:
    params = [
        sampled(temperature=0.9, seed=11, max_tokens=30),
        sampled(temperature=1.3, seed=12, max_tokens=30, top_k=20, extra_args={"dllm_policy": "static"}),
        sampled(temperature=0.9, seed=13, max_tokens=30, top_p=0.9, presence_penalty=0.5),
        sampled(temperature=1.0, seed=14, max_tokens=30, min_p=0.02, extra_args={"dllm_policy": "entropy"}),
    ]
    prompts = [PROMPT, PROMPT[:5], PROMPT[::-1], PROMPT[2:]]
    alone = [tokens_of(generate(llm, [prompt], p)[0]) for prompt, p in zip(prompts, params, strict=True)]
    together = [tokens_of(output) for output in generate(llm, prompts, params)]
    assert together == alone
    neighbours = [sampled(temperature=1.0, max_tokens=9 + i, logit_bias={3: 1.0}) for i in range(4)]
    mixed = generate(llm, [*prompts, *prompts], [*neighbours, *params])
    assert [tokens_of(output) for output in mixed[4:]] == alone


def test_seeds_and_positions_draw_independently(llm: LLM) -> None:
    outputs = generate(llm, [PROMPT] * 64, [sampled(temperature=1.5, seed=s, max_tokens=16) for s in range(64)])
    assert len({tuple(tokens_of(output)) for output in outputs}) > 60
    unseeded = generate(llm, [PROMPT] * 8, sampled(temperature=1.5, max_tokens=16))
    assert len({tuple(tokens_of(output)) for output in unseeded}) > 1


def test_zero_temperature_is_the_greedy_path_whatever_the_seed(llm: LLM) -> None:
    outputs = generate(llm, [PROMPT] * 2, [sampled(temperature=0.0, seed=s, max_tokens=24) for s in (1, 2)])
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
