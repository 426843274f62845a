"""A drafter of vLLM on the CPU changes neither what a model says nor how often."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.engine.cpu import draft_engine
from tests.engine.cpu.processes import run

ENGINE = Path(__file__).with_name("draft_engine.py")
DRAFTS = {
    "drawn drafts": ("--drafts", "probabilistic"),
    "likeliest drafts": ("--drafts", "greedy"),
}

pytestmark = pytest.mark.slow


@functools.cache
def report(*options: str) -> dict[str, Any]:
    """Return what ``draft_engine.py`` prints, on Model Runner V2."""
    return json.loads(run(str(ENGINE), *options, is_warm=True, VLLM_USE_V2_MODEL_RUNNER="1"))


@pytest.fixture(scope="module")
def target_distribution() -> np.ndarray:
    """Return the distribution of the first three tokens after the prompt, float64 [vocab, vocab, vocab]."""
    model, _ = draft_engine.make_models()
    vocab = range(draft_engine.VOCAB)
    texts = torch.tensor([[*draft_engine.PROMPT, *pair] for pair in itertools.product(vocab, vocab)])
    with torch.no_grad():
        distributions = (
            model(texts).logits[:, -3:].double().softmax(-1).numpy().reshape(len(vocab), len(vocab), 3, len(vocab))
        )
    return distributions[0, 0, 0][:, None, None] * distributions[:, 0, 1][:, :, None] * distributions[:, :, 2]


@pytest.mark.parametrize("options", DRAFTS.values(), ids=DRAFTS)
def test_greedy_text_and_its_log_probabilities_are_those_without_drafts(options):
    plain, drafted = report(), report(*options)
    assert drafted["runner"] == plain["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert 0 < drafted["num_accepted_tokens"] < drafted["num_draft_tokens"]
    assert drafted["greedy"] == plain["greedy"]
    assert drafted["scored"] == plain["scored"]
    torch.testing.assert_close(torch.tensor(drafted["logprobs"]), torch.tensor(plain["logprobs"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [(), *DRAFTS.values()], ids=["no drafts", *DRAFTS])
def test_drawn_text_follows_the_distribution_of_the_model(options, target_distribution):
    counts = np.zeros_like(target_distribution)
    np.add.at(counts, tuple(np.array(report(*options)["drawn"]).T), 1)
    assert counts.sum() == draft_engine.DRAWS
    for summed in ((1, 2), (2,), (0, 1), ()):
        observed = counts.sum(axis=summed).reshape(-1)
        expected = draft_engine.DRAWS * target_distribution.sum(axis=summed).reshape(-1)
        rare = expected < 5
        if rare.any():
            observed = np.append(observed[~rare], observed[rare].sum())
            expected = np.append(expected[~rare], expected[rare].sum())
        assert stats.chisquare(observed, expected).pvalue > 1e-3
