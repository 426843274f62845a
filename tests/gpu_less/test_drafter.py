"""DEER's rounds: a drafter's row plan and sampling are right on a GPU too, without the host ever waiting."""

from typing import Any

import pytest

from tests.engine.harness import generate
from tests.engine.speculators.engines import CACHES, CONTEXTS, engine, sampled
from tests.gpu_less.replay import replayed_drafter

PROMPTS = [[1 + place % 20 for place in range(length)] for length in (37, 5, 64)]
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
