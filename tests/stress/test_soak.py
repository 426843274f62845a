"""The soak of ``benchmarks/soak.py`` in small: every answer under load is the one that its request gets alone."""

from pathlib import Path

import pytest

from tests.engine.harness import engine
from tests.server.server import MAX_DRAFTS, MAX_MODEL_LEN, MAX_NUM_SEQS, Server

# Beside the server's own module, which says where benchmarks are.
import soak  # isort: skip
from soak_oracle import Case, cases_of  # isort: skip
from soak_report import Run  # isort: skip
from soak_families import FAMILIES  # isort: skip
from soak_traffic import Manner, Pool  # isort: skip

pytestmark = pytest.mark.slow

SEED = 1
DISTINCT, REQUESTS, CONCURRENCY = 36, 300, 48
FAMILY = FAMILIES["sdar"]
FEATURES = {
    *(f"verify {name}" for name in ("none", "freedave", "spiffy", "psd", "fef")),
    *(f"policy {name}" for name in ("static", "threshold", "sequential", "entropy", "localleap", "random")),
    *("drafts auto", "match subset", "chat", "completion", "greedy", "temperature", "n > 1", "stop string"),
    *("shared prefix", "up to max_model_len", "whole", "streamed", "cancelled", "malformed"),
}
"""What is in the stream."""


@pytest.fixture(scope="module")
def cases(checkpoint: Path) -> list[Case]:
    llm = engine(
        checkpoint,
        dllm={"max_drafts": MAX_DRAFTS},
        max_model_len=MAX_MODEL_LEN,
        hf_overrides={},
        max_num_seqs=MAX_NUM_SEQS,
        skip_tokenizer_init=False,
    )
    found, left_out = cases_of(llm, iter(Pool(FAMILY, SEED)), DISTINCT, shakes=1)
    assert left_out <= 3
    return found


@pytest.fixture(scope="module")
def run(server: Server, cases: list[Case]) -> Run:
    return soak.soak(server, FAMILY, cases, requests=REQUESTS, concurrency=CONCURRENCY, seed=SEED, interval=0.25)


def test_no_answer_under_load_is_wrong_and_nothing_else_goes_wrong(run: Run) -> None:
    assert run.wrong == []
    assert run.failures == []
    assert len(run.outcomes) == REQUESTS + 1


def test_all_kinds_of_requests_were_sent_and_more_than_the_server_decodes_at_once(run: Run) -> None:
    assert FEATURES - set(run.features) == set()
    assert run.verdicts["left"] >= 0.05 * REQUESTS
    assert run.verdicts["refused"] >= 0.03 * REQUESTS
    assert max(sample.metrics["vllm:num_requests_running"] for sample in run.samples) == MAX_NUM_SEQS


def test_nothing_is_held_afterwards(run: Run) -> None:
    assert run.held() == {"KV pages in use": (0, 0), "scratch pages in use": (0, 0)}


def test_a_wrong_expectation_is_noticed(server: Server, cases: list[Case]) -> None:
    """One token of one answer is another."""
    (first, *others) = cases[0].expected
    altered = Case(cases[0].request, [first._replace(tokens=[*first.tokens[:-1], first.tokens[-1] ^ 1]), *others])
    run = soak.soak(server, FAMILY, [altered, *cases[1:4]], requests=16, concurrency=8, seed=SEED)
    asked = [outcome for outcome in run.outcomes if outcome.sending.index == 0]
    ended = [outcome for outcome in asked if outcome.sending.manner in (Manner.WHOLE, Manner.STREAM)]
    assert ended
    assert all(outcome.verdict == "wrong" for outcome in ended)
    assert run.failures == [f"{len(run.wrong)} wrong answers"]
    assert run.wrong[0].expected == altered.expected
    assert run.wrong[0].got == cases[0].expected
