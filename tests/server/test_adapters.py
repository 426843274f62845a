"""LoRA adapters behind a real server: as models of their own names, loaded while the server runs."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx
import openai
import pytest

from tests.paths import BENCHMARKS, ROOT
from vllm_dllm.commands.engine import BUNDLED_MODEL
from vllm_dllm.tiny.text import render_prompt

from .ask import completion
from .server import FLAGS, Server, serve

sys.path.insert(0, str(BENCHMARKS))

from adapters import random_adapter, write_adapter

pytestmark = pytest.mark.slow

CHECKPOINT = BUNDLED_MODEL.with_name("tiny-llada")
EXAMPLE = ROOT / "examples" / "adapter"
PROMPT = render_prompt("Ada has 12 apples. Ben gives Ada 7 more. How many apples does Ada have now?")


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "server.log"
    flags = {"--enable-lora": "--max-loras=1", "--lora-modules": f"example={EXAMPLE}"}
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with mock.patch.dict(FLAGS, flags), mock.patch.dict("os.environ", allowed), serve(CHECKPOINT, log) as running:
        yield running


def answer(client: openai.OpenAI, **more: object) -> list[int]:
    return client.completions.create(**{**completion(PROMPT), **more}).choices[0].token_ids  # type: ignore[attr-defined]


def test_an_adapter_is_a_model_that_comes_and_goes(llada: Server, tmp_path: Path) -> None:
    pairs = random_adapter(CHECKPOINT, re.compile(r"(attn_out|ff_proj)$"), rank=4, seed=1, size=1.0)
    write_adapter(pairs, tmp_path / "strong")
    with llada.connect() as client:
        base = answer(client)
        assert {model.id for model in client.models.list()} >= {"example"}
        assert len(answer(client, model="example")) == len(base)
        named = {"lora_name": "strong", "lora_path": str(tmp_path / "strong")}
        assert httpx.post(f"{llada.address}/v1/load_lora_adapter", json=named, timeout=60).status_code == 200
        strong = answer(client, model="strong")
        assert strong != base
        assert answer(client) == base
        assert answer(client, model="strong") == strong
        assert httpx.post(f"{llada.address}/v1/unload_lora_adapter", json={"lora_name": "strong"}).status_code == 200
        with pytest.raises(openai.NotFoundError, match="strong"):
            answer(client, model="strong")
        assert answer(client) == base


def test_the_metrics_of_adapters_name_adapters_alone(llada: Server) -> None:
    """Rows and scratch pages of a step travel in the field of running adapters."""
    with llada.connect() as client:
        answer(client, model="example")
    metrics = httpx.get(f"{llada.address}/metrics").text
    labels = [json.loads(each) for each in re.findall(r'running_lora_adapters=("[^"]*")', metrics)]
    assert labels
    assert {name for label in labels for name in label.split(",") if name} <= {"example", "strong"}
