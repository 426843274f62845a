"""The distributions that drafts are drawn from, and that the rejection test is told of, are the drafter's own.

Wherever they depend on nothing but the text they are compared with a full recompute of it. K/V kept by a drafter with
full attention is as old as the text was new, so its distributions are tested where nothing is older than the round.
"""

from collections.abc import Sequence

import pytest
import torch
from vllm import LLM, RequestOutput

from tests.engine.harness import generate, greedy, preemptions, tokens_of
from tests.engine.speculators.checkpoints import MASK, SEP, VOCAB
from tests.engine.speculators.engines import (
    CACHES,
    EXACT,
    Drafted,
    assert_distributions,
    drafted,
    engine,
    reference_drafter,
    reference_target,
    sampled,
    verified,
)
from tests.reference.deer import target_logits

exactly = pytest.mark.parametrize(("context", "cache"), EXACT)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Any tokens of the target, those among them that the drafter does not share."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return [*tokens[:-2], MASK, SEP, tokens[0]][-length:] if length > 3 else tokens


PROMPTS = [prompt(length) for length in (1, 2, 7, 8, 9, 31, 32, 33, 70)]
"""Up to and beyond blocks and pages."""


def run(
    llm: LLM, prompts: Sequence[list[int]], *, temperature: float = 1.0
) -> tuple[list[RequestOutput], list[Drafted]]:
    with drafted(llm) as seen:
        outputs = generate(llm, prompts, [sampled(seed, temperature=temperature) for seed in range(len(prompts))])
    return outputs, seen


@exactly
def test_distributions_in_every_round_of_a_batch(context: str, cache: str) -> None:
    llm = engine(context, cache)
    llm.reset_prefix_cache()
    with verified(llm) as rounds:
        outputs, seen = run(llm, PROMPTS)
    # Rounds began in many ways.
    assert {round_.accepted for own in rounds.values() for round_ in own} >= {0, 1}
    assert len(seen) > 5 * len(PROMPTS)
    assert {MASK, SEP} & {token for output in outputs for token in tokens_of(output)}
    assert_distributions(seen, reference_drafter(context, 4))
    assert not {MASK, SEP if context != "block-causal" else MASK} & {token for r in seen for token in r.drafts}


def test_distributions_of_full_attention_with_kept_keys_where_all_the_text_is_new() -> None:
    llm = engine("full", "keep")
    llm.reset_prefix_cache()
    with drafted(llm) as seen:
        generate(llm, PROMPTS, sampled(None, max_tokens=1))
    assert_distributions(seen, reference_drafter("full", 4))


def test_colder_drafts_are_drawn_from_colder_distributions() -> None:
    factor, expected = 0.25, reference_drafter("causal", 4)
    llm = engine("causal", speculative={"draft_temperature_factor": factor})
    llm.reset_prefix_cache()
    _, seen = run(llm, PROMPTS)
    colder = [round_._replace(distributions=round_.distributions * factor) for round_ in seen]
    assert_distributions(colder, expected)
    own = [expected.logits(round_.text).softmax(-1) for round_ in seen]
    drafted_tokens = [torch.tensor(round_.drafts[: len(p)]) for round_, p in zip(seen, own, strict=True)]
    likely = [p.gather(1, tokens[:, None]).mean() for p, tokens in zip(own, drafted_tokens, strict=True)]
    # Colder draws take likelier tokens than draws from the drafter's own distribution do.
    assert torch.stack(likely).mean() > 1.2 * torch.stack([p.square().sum(1).mean() for p in own]).mean()


@exactly
@pytest.mark.parametrize("num_drafts", [1, 13])
def test_distributions_of_other_numbers_of_drafts(context: str, cache: str, num_drafts: int) -> None:
    """Of fewer drafts than a block has, and of more."""
    llm = engine(context, cache, num_drafts=num_drafts)
    _, seen = run(llm, PROMPTS[2:6])
    assert_distributions(seen, reference_drafter(context, num_drafts))


@exactly
def test_distributions_with_prompts_computed_in_chunks_beside_running_requests(context: str, cache: str) -> None:
    # A text that is computed anew must fit.
    budget = {"max_num_batched_tokens": 48} if cache == "keep" else {"long_prefill_token_threshold": 20}
    llm = engine(context, cache, max_num_seqs=3, enable_prefix_caching=False, **budget)
    _, seen = run(llm, [*PROMPTS[::-1], prompt(101)])
    assert_distributions(seen, reference_drafter(context, 4))


@pytest.mark.parametrize("context", ["causal", "block-causal"])
def test_distributions_after_hits_in_the_prefix_cache(context: str) -> None:
    llm = engine(context)
    llm.reset_prefix_cache()
    first, _ = run(llm, [prompt(70), prompt(45)])
    # Prompts that go on from what was generated, and from a page in the middle.
    longer = [list(output.prompt_token_ids) + tokens_of(output) for output in first]
    prompts = [*longer, prompt(70)[:64] + prompt(9), prompt(70)[:64], prompt(70)]
    outputs, seen = run(llm, prompts)
    assert min(output.num_cached_tokens for output in outputs) >= 32
    assert_distributions(seen, reference_drafter(context, 4))


@exactly
def test_distributions_after_preemption(context: str, cache: str) -> None:
    llm = engine(context, cache, num_gpu_blocks_override=12)
    with preemptions(llm) as preempted, drafted(llm) as seen:
        params = [sampled(seed, max_tokens=40) for seed in range(8)]
        generate(llm, [prompt(25 + seed) for seed in range(8)], params)
    assert preempted
    assert_distributions(seen, reference_drafter(context, 4))


@exactly
def test_distributions_up_to_the_end_of_the_context(context: str, cache: str) -> None:
    limit = 44
    llm = engine(context, cache, max_model_len=limit, max_num_batched_tokens=128)
    with drafted(llm) as seen:
        outputs = generate(llm, [prompt(27), prompt(38), prompt(43)], sampled(3, max_tokens=None))
    assert [len(tokens_of(output)) for output in outputs] == [17, 6, 1]
    in_the_middle = [round_ for round_ in seen if len(round_.text) < limit]
    assert any(len(round_.text) + 4 > limit for round_ in in_the_middle)
    assert_distributions(in_the_middle, reference_drafter(context, 4, limit=limit))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_the_first_draft_of_the_targets_own_weights_is_always_accepted(cache: str, temperature: float) -> None:
    """It has the target's own distribution, but for tokens that are not shared: only those can take its place."""
    llm = engine("causal", cache, seed=0)
    prompts = [[token % MASK for token in prompt] for prompt in PROMPTS]
    with drafted(llm) as seen:
        params = [sampled(seed, temperature=temperature, max_tokens=20) for seed in range(len(PROMPTS))]
        outputs = generate(llm, prompts, params)
    # Of a text with other tokens the drafter reads something else.
    seen = [round_ for round_ in seen if not {MASK, SEP} & set(round_.text)]
    for round_ in seen[::5]:
        own = target_logits(reference_target(), round_.text, len(round_.text))[0].clone()
        own[[MASK, SEP]] = -torch.inf
        torch.testing.assert_close(round_.distributions[0], own, atol=1e-4, rtol=0)
    first = {tuple(round_.text): round_.drafts[0] for round_ in seen}
    next_tokens = []
    for output in outputs:
        text = (*output.prompt_token_ids, *tokens_of(output))
        next_tokens += [(first[text[:n]], text[n]) for n in range(len(text)) if text[:n] in first]
    assert len(next_tokens) > 2 * len(PROMPTS)
    assert {token for draft, token in next_tokens if draft != token} <= {MASK, SEP}


def test_greedy_requests_are_drafted_greedily_and_others_from_the_distribution() -> None:
    llm = engine("causal")
    params = [greedy(max_tokens=12), sampled(5), sampled(6)]
    with drafted(llm) as seen:
        generate(llm, [PROMPTS[4]] * 3, params)
    slots = {round_.slot for round_ in seen}
    likeliest = {
        slot: [r.distributions.argmax(-1).tolist() == r.drafts for r in seen if r.slot == slot] for slot in slots
    }
    assert sorted(all(rounds) for rounds in likeliest.values()) == [False, False, True]
