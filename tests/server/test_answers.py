"""Chat and text completions of a served diffusion model, whole and streamed."""

from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from .ask import CODE, QUESTION, TOKENS, chat, completion
from .server import MAX_MODEL_LEN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> Any:
    """The completion that nothing ends before it has ``TOKENS`` tokens: its one choice."""
    return client.completions.create(**completion(CODE)).choices[0]


def test_a_chat_is_answered_and_billed_by_the_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat(QUESTION))
    (choice,) = answer.choices
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(choice.token_ids) == TOKENS
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + TOKENS


def test_a_completion_is_answered_and_billed_by_the_token(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(**completion(CODE))
    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(choice.token_ids)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(choice.token_ids) == TOKENS
    assert answer.usage.prompt_tokens == len(choice.prompt_token_ids) == len(tokenizer.encode(CODE).ids)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 13])
def test_an_answer_ends_with_max_tokens_wherever_its_blocks_end(
    client: openai.OpenAI, whole: Any, max_tokens: int
) -> None:
    answer = client.completions.create(**completion(CODE, max_tokens=max_tokens))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    assert answer.choices[0].token_ids == whole.token_ids[:max_tokens]
    assert answer.choices[0].finish_reason == "length"


def test_tokens_behind_a_stop_token_are_neither_returned_nor_billed(client: openai.OpenAI, whole: Any) -> None:
    tokens = whole.token_ids
    first_occurrences = [index for index in range(TOKENS) if tokens[index] not in tokens[:index]]
    # Several, for one of them may be the last of its block.
    for index in first_occurrences[:4]:
        answer = client.completions.create(**completion(CODE, body={"stop_token_ids": [tokens[index]]}))
        (choice,) = answer.choices
        assert choice.token_ids == tokens[: index + 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == index + 1
        assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[index])


def test_tokens_behind_a_stop_string_are_neither_returned_nor_billed(
    client: openai.OpenAI, whole: Any, tokenizer: Tokenizer
) -> None:
    stop = whole.text[len(whole.text) // 2 :][:3]
    answer = client.completions.create(**completion(CODE, stop=[stop]))
    (choice,) = answer.choices
    assert choice.text == whole.text[: whole.text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(choice.token_ids) < TOKENS
    assert stop in tokenizer.decode(choice.token_ids)
    assert stop not in tokenizer.decode(choice.token_ids[:-1])


@pytest.mark.parametrize("prompt_length", [MAX_MODEL_LEN - n for n in (1, 2, 5, 9)])
def test_an_answer_ends_where_the_context_does_also_inside_a_block(
    client: openai.OpenAI, block_length: int, prompt_length: int
) -> None:
    assert MAX_MODEL_LEN % block_length
    prompt = [10 + n % 50 for n in range(prompt_length)]
    answer = client.completions.create(**completion(prompt, max_tokens=None))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(answer.choices[0].token_ids)
    assert answer.usage.total_tokens == MAX_MODEL_LEN


def test_chunks_of_a_stream_are_finished_blocks_and_add_up_to_the_answer(
    client: openai.OpenAI, whole: Any, block_length: int
) -> None:
    first, *others = client.completions.create(**completion(CODE, stream=True))
    known = len(first.choices[0].prompt_token_ids)
    chunks = [chunk.choices[0] for chunk in (first, *others) if chunk.choices[0].token_ids]
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    for chunk in chunks[:-1]:
        known += len(chunk.token_ids)
        assert known % block_length == 0
        assert chunk.finish_reason is None
    assert chunks[-1].finish_reason == "length"


def test_a_streamed_chat_adds_up_to_the_answer_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**chat(QUESTION))
    *chunks, last = client.chat.completions.create(
        **chat(QUESTION, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len([delta for delta in deltas if delta]) > 1
    assert "".join(deltas) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage == whole.usage


def test_a_stream_stops_at_a_stop_string_without_having_shown_any_of_it(client: openai.OpenAI, whole: Any) -> None:
    stop = whole.text[len(whole.text) // 2 :][:3]
    chunks = list(client.completions.create(**completion(CODE, stop=[stop], stream=True)))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text[: whole.text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
