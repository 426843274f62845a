"""Two engines behind one server: it makes no difference which of them answers."""

import asyncio
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm import SamplingParams

from tests.engine.harness import engine, generate, tokens_of
from tests.server.ask import completion
from tests.server.server import FLAGS, MAX_DRAFTS, MAX_MODEL_LEN, Server, serve
from vllm_dllm.commands.engine import BUNDLED_MODEL

pytestmark = pytest.mark.slow

ENGINES = 2
VERIFIERS: tuple[dict[str, Any], ...] = (
    {"dllm_policy": "threshold", "dllm_threshold": 0.5},
    {"dllm_policy": "static", "dllm_verify": "freedave", "dllm_drafts": 8},
    {"dllm_verify": "spiffy", "dllm_drafts": 3},
    {"dllm_verify": "psd", "dllm_drafts": 3},
    {"dllm_verify": "fef", "dllm_window": 8},
)
REQUESTS = 20


def prompt_of(number: int) -> list[int]:
    return [10 + (7 * number + position) % 300 for position in range(5 + 13 * number % 90)]


def params_of(number: int) -> dict[str, Any]:
    """Sampling parameters that the server and the engine call the same."""
    return {"max_tokens": 5 + 11 * number % 40, "temperature": 0.8 * (number % 4 == 3), "seed": number}


def alone(number: int) -> list[int]:
    """What an engine of this process answers that has nothing else to do."""
    llm = engine(
        BUNDLED_MODEL, dllm={"max_drafts": MAX_DRAFTS}, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, hf_overrides={}
    )
    params = SamplingParams(
        **params_of(number), extra_args=VERIFIERS[number % len(VERIFIERS)], ignore_eos=True, detokenize=False
    )
    return tokens_of(generate(llm, [prompt_of(number)], params)[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # By default each engine has an API server of its own, which takes as long to start as an engine.
    flags = {"--data-parallel-size": str(ENGINES), "--api-server-count": "1"}
    log: Path = tmp_path_factory.mktemp("serve") / "server.log"
    with mock.patch.dict(FLAGS, flags), serve(BUNDLED_MODEL, log) as running:
        yield running


async def answers(server: Server, numbers: Sequence[int]) -> list[list[int]]:
    async with server.connect_async() as client:
        replies = await asyncio.gather(
            *(
                client.completions.create(
                    **completion(prompt_of(number), **params_of(number), **VERIFIERS[number % len(VERIFIERS)])
                )
                for number in numbers
            )
        )
    return [reply.choices[0].token_ids for reply in replies]  # type: ignore[attr-defined]


def by_engine(server: Server, name: str) -> dict[str, float]:
    """Values of a sample by its label ``engine``."""
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_answers_are_those_of_one_engine_and_both_engines_give_some(server: Server) -> None:
    numbers = range(REQUESTS)
    assert asyncio.run(answers(server, numbers)) == [alone(number) for number in numbers]
    for name in ("vllm:request_success_total", "vllm_dllm:forwards_total", "vllm_dllm:tokens_per_forward_count"):
        assert by_engine(server, name).keys() == {str(index) for index in range(ENGINES)}, name
    finished = by_engine(server, "vllm_dllm:tokens_per_forward_count")
    assert sum(finished.values()) == REQUESTS
    assert min(finished.values()) > 0
    tokens = by_engine(server, "vllm_dllm:committed_tokens_total")
    assert sum(tokens.values()) == sum(params_of(number)["max_tokens"] for number in numbers)
