"""The soak's own parts: its stream, its judgement, its report. No server."""

import itertools
import sys
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import soak
from soak_client import Outcome, Reply, judge
from soak_families import FAMILIES
from soak_oracle import Case, Choice
from soak_report import LEAK, LEAST_REQUESTS, Run, Sample, plot, result_of, sheets_of
from soak_traffic import Manner, Pool, Request, Sending, malformed, stream_of

from vllm_dllm.models.configs import LLaDAConfig, SDARConfig
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.schema import DllmConfig, parse_request_options

TEXT = Choice("one two", [1, 2, 3], "length", None)
CASES = [
    Case(Request("a", True, {"max_tokens": 3, "temperature": 0.0}, {}), [TEXT]),
    Case(Request([5], False, {"max_tokens": 3, "temperature": 1.0, "n": 2}, {"dllm_verify": "psd"}), [TEXT, TEXT]),
]
BAD = malformed("tiny", diffusion=True)


def sending(manner: Manner, index: int = 0) -> Sending:
    return Sending(0, manner, index)


@pytest.mark.parametrize(
    ("manner", "reply", "verdict"),
    [
        (Manner.WHOLE, Reply(200, choices=[TEXT], ended=True), "right"),
        (Manner.WHOLE, Reply(200, choices=[TEXT._replace(tokens=[1, 2, 4])], ended=True), "wrong"),
        (Manner.WHOLE, Reply(200, choices=[TEXT._replace(text="one")], ended=True), "wrong"),
        (Manner.WHOLE, Reply(200, choices=[TEXT._replace(finish_reason="stop")], ended=True), "wrong"),
        (Manner.WHOLE, Reply(200, choices=[TEXT, TEXT], ended=True), "wrong"),
        (Manner.STREAM, Reply(200, choices=[], ended=True), "wrong"),
        (Manner.LEAVE, Reply(200, choices=[TEXT._replace(text="one ", tokens=[1])]), "left"),
        (Manner.LEAVE, Reply(200, choices=[]), "left"),
        (Manner.LEAVE, Reply(200, choices=[TEXT._replace(text="two", tokens=[2])]), "wrong"),
        (Manner.LEAVE, Reply(200, choices=[TEXT], ended=True), "right"),
        (Manner.WHOLE, Reply(500, "status 500"), "status 500"),
        (Manner.MALFORMED, Reply(400, "status 400"), "refused"),
        (Manner.MALFORMED, Reply(500, "status 500"), f"malformed ({BAD[0].name}), yet status 500"),
        (Manner.MALFORMED, Reply(200, choices=[TEXT], ended=True), f"malformed ({BAD[0].name}), yet answered"),
        (Manner.MALFORMED, Reply(error="connection refused"), f"malformed ({BAD[0].name}), yet connection refused"),
    ],
)
def test_a_reply_is_judged_by_what_its_request_gets_alone(manner: Manner, reply: Reply, verdict: str) -> None:
    assert judge(sending(manner), reply, CASES, BAD) == verdict


def test_a_stream_is_the_same_for_a_seed_and_has_the_shares_it_should() -> None:
    stream = list(stream_of(4000, 50, 9, seed=3))
    assert stream == list(stream_of(4000, 50, 9, seed=3))
    assert stream != list(stream_of(4000, 50, 9, seed=4))
    shares = {manner: count / 4000 for manner, count in Counter(one.manner for one in stream).items()}
    assert shares[Manner.LEAVE] == pytest.approx(0.10, abs=0.02)
    assert shares[Manner.MALFORMED] == pytest.approx(0.05, abs=0.015)
    assert {one.index for one in stream if one.manner is Manner.MALFORMED} == set(range(9))
    assert {one.index for one in stream if one.manner is Manner.WHOLE} == set(range(50))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pool_is_the_same_for_a_seed_and_asks_for_everything(name: str) -> None:
    family = FAMILIES[name]
    pool = list(itertools.islice(Pool(family, 0), 60))
    assert pool == list(itertools.islice(Pool(family, 0), 60))
    asked = [request.options for request in pool]
    for way in (*family.plain, *family.own, *family.verifiers):
        assert any(way.items() <= options.items() for options in asked), way
    features = {feature for request in pool for feature in request.features}
    assert {"chat", "completion", "greedy", "temperature", "n > 1", "stop string", "shared prefix"} <= features


@pytest.mark.parametrize(("name", "config"), [("sdar", SDARConfig), ("llada", LLaDAConfig)])
def test_every_request_of_a_pool_is_allowed(name: str, config: type) -> None:
    family = FAMILIES[name]
    engine = DllmConfig(**family.engine["additional_config"]["dllm"])
    for request in itertools.islice(Pool(family, 0), 200):
        options = parse_request_options(dict(request.options))
        resolve(options, engine, config.traits, 32, request.fields["max_tokens"])


def run_of(memory: list[int], **changes: object) -> Run:
    """A run in which a process has this much memory as it goes."""
    metrics = {
        "vllm:num_preemptions_total": 4.0,
        "vllm:generation_tokens_total": 100.0,
        "vllm:num_requests_running": 2.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:kv_cache_usage_perc": 0.5,
    }
    samples = [Sample(float(at), {"API server": size}, metrics) for at, size in enumerate(memory)]
    idle = Sample(0.0, {"API server": memory[0]}, dict.fromkeys(metrics, 0.0))
    outcomes = [
        Outcome(sending(Manner.WHOLE), 0.0, 1.0, None, 3, "right"),
        Outcome(sending(Manner.LEAVE, 1), 0.5, 0.2, 0.1, 1, "left"),
        Outcome(sending(Manner.MALFORMED), 0.6, 0.1, None, 0, "refused"),
    ]
    run = Run("sdar", CASES, 1, outcomes, [], 100.0, samples, idle, idle, False)
    return replace(run, **changes)  # type: ignore[arg-type]


LOOKS = 100
FLAT = [1000] * LOOKS


def test_a_run_without_a_fault_has_no_failures() -> None:
    run = run_of(FLAT)
    assert run.failures == []
    assert run.features == Counter(
        {"whole": 1, "cancelled": 1, "malformed": 1, "verify none": 1, "verify psd": 1, "chat": 1, "completion": 1}
        | {"greedy": 1, "temperature": 1, "n > 1": 1}
    )


def test_memory_that_grows_all_the_time_is_a_leak_and_caches_that_fill_are_none() -> None:
    growing = [1000 + at for at in range(LOOKS)]
    outcomes = run_of(FLAT).outcomes[:1] * LEAST_REQUESTS
    assert run_of(growing, outcomes=outcomes).failures == ["API server grew by 7.9 %"]
    assert run_of(growing).leaks() is None
    assert run_of(growing).failures == []
    filling = [500] * (LOOKS // 10) + [1000] * (LOOKS - LOOKS // 10)
    assert run_of(filling).growth() == {"API server": 0.0}
    within = [1000] * (LOOKS // 2) + [int(1000 * (1 + LEAK)) - 1] * (LOOKS // 2)
    assert run_of(within, outcomes=outcomes).failures == []
    assert run_of(growing[:15]).growth() is None


def test_what_went_wrong_is_counted_by_kind() -> None:
    run = run_of(FLAT)
    verdicts = ["wrong", "status 500", "wrong", "connection lost (ServerDisconnectedError)"]
    bad = [Outcome(sending(Manner.WHOLE), 0.0, 1.0, None, 3, verdict) for verdict in verdicts]
    failed = replace(run, outcomes=[*run.outcomes, *bad], died=True, after=None)
    assert failed.failures == [
        "2 wrong answers",
        "1 times connection lost (ServerDisconnectedError)",
        "1 times status 500",
        "the server died",
        "KV pages in use: None after, 0.0 before",
    ]


def test_pages_that_are_not_back_are_a_failure() -> None:
    run = run_of(FLAT)
    held = replace(run.before, metrics={**run.before.metrics, "vllm:kv_cache_usage_perc": 0.01})
    assert replace(run, after=held).failures == ["KV pages in use: 0.01 after, 0.0 before"]


@pytest.mark.parametrize("died", [False, True])
def test_tables_plot_and_result_of_a_run(tmp_path: Path, died: bool) -> None:
    run = run_of(FLAT, **({"died": True, "after": None} if died else {}))
    console = Console(file=StringIO(), width=200)
    for sheet in sheets_of(run):
        console.print(sheet.rich())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("miss" in text) == died
    assert "verify" in text
    plot(run, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert result_of(run)["failures"] == run.failures


def test_a_page_gets_its_section_once(tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    soak.make_place(page)
    once = page.read_text()
    assert once.startswith("# Reliability\n\n## Soak\n")
    soak.make_place(page)
    assert page.read_text() == once
