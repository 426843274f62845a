"""What a server's log says when it starts."""

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm_dllm import __version__
from vllm_dllm.observe.metrics import SCRATCH_PAGES
from vllm_dllm.patches import PATCHES

from .server import MAX_DRAFTS, MAX_MODEL_LEN, MAX_NUM_SEQS, Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lines(server: Server) -> list[tuple[str, dict[str, str]]]:
    """Subject and facts of each of our lines."""
    found = re.findall(r"vllm-dllm (\w+): (.*)", server.log.read_text())
    return [(subject, dict(fact.split("=", 1) for fact in shlex.split(facts))) for subject, facts in found]


@pytest.fixture(scope="module")
def facts(lines: list[tuple[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    return dict(lines)


def test_an_engine_says_each_thing_once(lines: list[tuple[str, dict[str, str]]]) -> None:
    assert Counter(subject for subject, _ in lines) == dict.fromkeys(
        ("engine", "decoding", "cache", "batch", "patches"), 1
    )


def test_the_log_tells_the_model(facts: dict[str, dict[str, str]], checkpoint: Path, config: dict[str, Any]) -> None:
    engine = facts["engine"]
    assert engine["version"] == __version__
    assert engine["model"] == str(checkpoint)
    assert (engine["family"], engine["architecture"]) == ("SDAR", "SDARForCausalLM")
    assert engine["block_length"] == str(config["block_size"])
    assert engine["sub_block_length"] == "none"
    assert (engine["tensor_parallel"], engine["data_parallel_index"]) == ("1", "0")


def test_the_log_tells_how_requests_are_decoded_that_ask_for_nothing(facts: dict[str, dict[str, str]]) -> None:
    assert facts["decoding"] == {
        "policy": "threshold",
        "threshold": "0.9",
        "tokens_per_step": "1",
        "verify": "none",
        "drafts": "0",
        "max_drafts": str(MAX_DRAFTS),
        "draft_graph": "shipped, calibrated on SDAR",
        "draft_graph_nodes": facts["decoding"]["draft_graph_nodes"],
        "draft_graph_model": facts["decoding"]["draft_graph_model"],
        "eager": "false",
    }
    assert int(facts["decoding"]["draft_graph_nodes"]) > 0


def test_the_log_tells_the_pages_that_the_metrics_count(facts: dict[str, dict[str, str]], server: Server) -> None:
    cache = {key: int(value) for key, value in facts["cache"].items() if value.isdigit()}
    assert cache["scratch_pages"] == MAX_NUM_SEQS * MAX_DRAFTS == server.metric(SCRATCH_PAGES)
    assert cache["pages"] == cache["request_pages"] + cache["scratch_pages"] + 1
    assert cache["request_pages"] * cache["page_size"] >= MAX_MODEL_LEN
    assert facts["cache"]["cache"] == "committed"
    assert facts["cache"]["prefix_caching"] == "true"


def test_the_log_tells_the_batch(facts: dict[str, dict[str, str]], config: dict[str, Any]) -> None:
    batch = facts["batch"]
    assert batch["max_requests"] == str(MAX_NUM_SEQS)
    assert batch["max_model_len"] == str(MAX_MODEL_LEN)
    assert batch["rows_per_request"] == str((1 + MAX_DRAFTS) * config["block_size"])
    assert int(batch["rows_per_step"]) >= int(batch["rows_per_request"])


def test_the_log_tells_the_changes_to_vllm(facts: dict[str, dict[str, str]]) -> None:
    patches = facts["patches"]
    told = [name for names in patches.values() if names != "none" for name in names.split(",")]
    assert sorted(told) == sorted(PATCHES)
