"""A model with full attention behind a real server."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import openai
import pytest

from vllm_dllm.commands.engine import BUNDLED_MODEL

from .ask import TOKENS, completion
from .server import FLAGS, MODEL, Server, serve
from .test_refusals import refused

pytestmark = pytest.mark.slow

CHECKPOINT = BUNDLED_MODEL.with_name("tiny-llada")
BUDGET = 256
PROMPT = "Ada has 12 apples. Ben gives"


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (CHECKPOINT / "config.json").is_file():
        pytest.skip(f"there is no model in {CHECKPOINT}")
    log: Path = tmp_path_factory.mktemp("serve") / "server.log"
    with mock.patch.dict(FLAGS, {"--max-num-batched-tokens": str(BUDGET)}), serve(CHECKPOINT, log) as running:
        yield running


@pytest.fixture(scope="module")
def llada_client(llada: Server) -> Iterator[openai.OpenAI]:
    with llada.connect() as connected:
        yield connected


@pytest.fixture(autouse=True)
def _still_serving(llada_client: openai.OpenAI) -> Iterator[None]:
    before = _answer(llada_client)
    yield
    assert _answer(llada_client) == before


def _answer(client: openai.OpenAI) -> list[int]:
    tokens = client.completions.create(**completion(PROMPT)).choices[0].token_ids  # type: ignore[attr-defined]
    assert len(tokens) == TOKENS
    return tokens


def test_a_text_that_no_step_has_room_for_is_refused_with_both_numbers(llada_client: openai.OpenAI) -> None:
    message = refused(llada_client.completions.create, **completion([20] * 200, max_tokens=60))
    # Whole blocks of 32.
    assert "a prompt of 200 tokens and 64 to be generated (max_tokens=60" in message
    assert f"make 264. LLaDA models compute a text whole, and a step has room for {BUDGET} tokens" in message


def test_drafts_that_no_step_has_room_for_are_refused_where_tokens_depend_on_them(llada_client: openai.OpenAI) -> None:
    options = {"dllm_verify": "freedave", "dllm_match": "subset", "dllm_drafts": 8}
    message = refused(llada_client.completions.create, **completion(PROMPT, **options))
    assert (
        "7 drafts and the text itself, up to 32 rows each with cache='dual', make 256, and a step has room for "
        in message
    )
    fewer = completion(PROMPT, **{**options, "dllm_drafts": 7})
    assert len(llada_client.completions.create(**fewer).choices[0].token_ids) == TOKENS  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dllm_steps": 33}, ["dllm_steps", "33", "makes 2 blocks of 32", "a multiple of 2"]),
        ({"dllm_policy": "best"}, ["dllm_policy", "'best'", "'maskgit_plus'", "'factor'"]),
        ({"dllm_cache": "none"}, ["unknown request option 'dllm_cache'"]),
    ],
)
def test_a_wrong_option_is_refused_by_key_value_and_what_is_allowed(
    llada_client: openai.OpenAI, options: dict[str, object], named: list[str]
) -> None:
    message = refused(llada_client.completions.create, **completion(PROMPT, **options))
    assert [word for word in named if word not in message] == []


def test_exact_drafts_change_no_token(llada_client: openai.OpenAI) -> None:
    drafted = completion(PROMPT, dllm_verify="freedave", dllm_drafts=4)
    assert llada_client.completions.create(**drafted).choices[0].token_ids == _answer(llada_client)  # type: ignore[attr-defined]


def test_a_text_comes_in_whole_blocks(llada_client: openai.OpenAI) -> None:
    chunks = llada_client.completions.create(**completion(PROMPT, stream=True, max_tokens=200))
    lengths = [len(chunk.choices[0].token_ids or ()) for chunk in chunks if chunk.choices]  # type: ignore[attr-defined]
    assert sum(lengths) == 200
    # Several at once where the client is slow.
    *whole, last = [length for length in lengths if length]
    assert all(length % 32 == 0 for length in whole)
    assert last % 32 == 200 % 32


def test_a_chat_without_max_tokens_is_answered(llada_client: openai.OpenAI) -> None:
    answer = llada_client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is 17 + 25?"}], temperature=0
    )
    (choice,) = answer.choices
    assert choice.message.content
    assert choice.finish_reason == "stop"


def test_an_answer_that_ends_at_the_default_max_tokens_says_so(llada_client: openai.OpenAI) -> None:
    answer = llada_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 64
    assert (choice.finish_reason, choice.stop_reason) == ("length", "max_tokens=64, the default")  # type: ignore[attr-defined]


def test_the_log_names_the_default_max_tokens(llada: Server) -> None:
    assert "Requests that give no max_tokens get 64, not the rest of the context" in llada.log.read_text()


def test_a_suffix_is_text_behind_the_completion(llada_client: openai.OpenAI) -> None:
    prompt, suffix = "We compute 12 + 7 = ", ".\n#### 19"
    one = llada_client.completions.create(model=MODEL, prompt=prompt, suffix=suffix, max_tokens=3, temperature=0)
    assert one.usage is not None
    assert one.usage.completion_tokens <= 3
    streamed = llada_client.completions.create(
        model=MODEL, prompt=prompt, suffix=suffix, max_tokens=3, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text
    # The text behind it counts.
    other = llada_client.completions.create(model=MODEL, prompt=prompt, suffix=" 1.", max_tokens=3, temperature=0)
    assert other.choices[0].text != one.choices[0].text


def test_a_prompt_with_masks_is_filled_in_and_wrong_ones_are_refused(llada_client: openai.OpenAI) -> None:
    mask = 3
    tokens = completion([20, mask, mask, 21, mask, 22], dllm_infill=True)
    assert len(llada_client.completions.create(**tokens).choices[0].token_ids) == 3  # type: ignore[attr-defined]
    assert "no mask token to fill in" in refused(
        llada_client.completions.create, **completion([20, 21], dllm_infill=True)
    )
    message = refused(llada_client.completions.create, model=MODEL, prompt=PROMPT, suffix=" b", echo=True)
    assert "Echo is unsupported with suffix" in message
