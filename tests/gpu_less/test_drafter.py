"""DEER's rounds: a drafter's row plan and sampling are right on a GPU too, without the host ever waiting."""

from typing import Any
from unittest import mock

import pytest

from tests.engine.harness import generate, runner_of
from tests.engine.speculators.engines import CACHES, CONTEXTS, engine, sampled
from tests.gpu_less.replay import replayed_drafter

PROMPTS = [[1 + place % 20 for place in range(length)] for length in (37, 5, 64)]
GROWING = {"draft_length": "failfast", "draft_length_start": 1, "draft_length_step": 2, "draft_length_max": 7}
BLOCKS = {"sub_block_length": 2, "unmask_threshold": 0.3}
ASKED: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {}, "top-p": {"top_p": 0.8}}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_drafter(context: str, cache: str) -> None:
    llm = engine(context, cache)
    for params in ASKED.values():
        with replayed_drafter(llm) as found:
            generate(llm, PROMPTS, sampled(3, **params))
        assert found.steps
        assert found.problems() == {}
        assert found.different == []


@pytest.mark.parametrize("context", ["causal", "block-causal"])
def test_drafts_that_grow(context: str) -> None:
    """The device decides how long they are; a round has all its forwards."""
    llm = engine(
        context, num_drafts=9, seed=0, speculative={**GROWING, **(BLOCKS if context == "block-causal" else {})}
    )
    with mock.patch.object(runner_of(llm).speculator, "ends_early", False), replayed_drafter(llm) as found:
        generate(llm, PROMPTS, [sampled(3, **params) for params in ASKED.values()])
    assert found.steps
    assert found.problems() == {}
    assert found.different == []
