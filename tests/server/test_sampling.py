"""Sampling parameters that vLLM refuses for its own diffusion models arrive over HTTP and take effect."""

from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from .ask import CODE, QUESTION, TOKENS, chat, completion

pytestmark = pytest.mark.slow


def tokens(client: openai.OpenAI, **fields: Any) -> list[int]:
    """Tokens of one answer. In sequence, for then what is unmasked does not depend on confidences."""
    reply = client.completions.create(**completion(CODE, dllm_policy="sequential", **fields))
    return reply.choices[0].token_ids


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> list[int]:
    return tokens(client)


@pytest.mark.parametrize("body", [{"top_k": 1}, {"min_p": 1.0}, {"top_k": 1, "min_p": 0.5}])
def test_cutting_all_but_the_likeliest_token_gives_the_greedy_answer(
    client: openai.OpenAI, greedy: list[int], body: dict[str, Any]
) -> None:
    assert tokens(client, temperature=1.0, seed=1, body=body) == greedy


def test_a_small_top_p_gives_the_greedy_answer(client: openai.OpenAI, greedy: list[int]) -> None:
    assert tokens(client, temperature=1.0, seed=1, top_p=1e-6) == greedy


def test_temperature_and_seed_draw_other_texts_each_reproducibly(client: openai.OpenAI, greedy: list[int]) -> None:
    drawn = [tokens(client, temperature=2.0, seed=seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert greedy not in drawn


def test_logit_bias_and_allowed_tokens_rule(client: openai.OpenAI) -> None:
    assert tokens(client, logit_bias={"20": 100}) == [20] * TOKENS
    assert set(tokens(client, body={"allowed_token_ids": [20, 30]})) <= {20, 30}


def test_bad_words_do_not_occur_however_likely(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("x").ids
    likely = {"logit_bias": {str(token): 100}}
    assert tokens(client, **likely) == [token] * TOKENS
    assert token not in tokens(client, **likely, body={"bad_words": ["x"]})


def test_min_tokens_holds_back_stop_tokens(client: openai.OpenAI, greedy: list[int]) -> None:
    stop = {"stop_token_ids": [greedy[2]]}
    assert len(tokens(client, body=stop)) <= 3
    assert len(tokens(client, body={**stop, "min_tokens": 15})) > 15


def test_an_answer_ends_with_the_end_token_unless_that_is_ignored(
    client: openai.OpenAI, config: dict[str, Any]
) -> None:
    end = config["eos_token_id"]
    certain = {"logit_bias": {str(end): 100}}
    assert tokens(client, **certain, body={"ignore_eos": False}) == [end]
    assert tokens(client, **certain, body={"ignore_eos": True}) == [end] * TOKENS


def test_penalties_change_the_answer(client: openai.OpenAI, greedy: list[int]) -> None:
    assert tokens(client, frequency_penalty=2.0, presence_penalty=2.0) != greedy
    assert tokens(client, body={"repetition_penalty": 2.0}) != greedy


def test_completion_logprobs_are_those_of_the_returned_tokens(client: openai.OpenAI) -> None:
    choice = client.completions.create(**completion(CODE, logprobs=3)).choices[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == TOKENS
    assert "".join(choice.logprobs.tokens) == choice.text
    for logprob, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        # Greedy: each token was the likeliest in the step that wrote it.
        assert logprob == max(top.values()) <= 0


def test_chat_logprobs_are_those_of_the_returned_tokens(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**chat(QUESTION, logprobs=True, top_logprobs=4)).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == TOKENS
    for position in choice.logprobs.content:
        assert len(position.top_logprobs) == 4
        assert position.logprob == max(top.logprob for top in position.top_logprobs)


def test_n_gives_as_many_choices_that_differ(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**chat(QUESTION, n=3, temperature=2.0, seed=5))
    assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) == 3
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3 * TOKENS
