"""Models with full attention against the official implementations' outputs, all cases of a configuration in a batch."""

from collections import Counter
from functools import partial
from typing import Any, Literal

import pytest
from vllm import RequestOutput

from tests.engine.full_attention import FAMILIES, bundled, drafting_engine, engine_of, golden, params_of
from tests.engine.harness import MASK, generate, nfe_of, recorded_rounds, tokens_of
from tests.engine.step_maps import block_of, mapped, misplaced
from tests.reference.bidirectional import Options, decode
from tests.reference.golden import BidirectionalCase
from tests.reference.step_map import step_map

pytestmark = pytest.mark.slow

Cache = Literal["none", "prefix", "dual"]
CACHES: tuple[Cache, ...] = ("none", "prefix", "dual")


def _cases(family: str, cache: str) -> dict[tuple[int, bool], list[BidirectionalCase]]:
    """Cases by what is fixed for an engine: block length, and whether there are drafts."""
    found: dict[tuple[int, bool], list[BidirectionalCase]] = {}
    for case in golden(family).cases:
        if case.cache == cache:
            found.setdefault((case.block_length, case.options.verify != "none"), []).append(case)
    return found


def _exit(case: BidirectionalCase) -> int:
    """Positions of the window up to the block that made the official code stop; all of them where none did."""
    length = case.block_length
    for end in range(length, len(case.tokens) + 1, length):
        block = case.tokens[end - length : end]
        if len(set(block)) == 1 and block[0] in case.options.early_exit:
            return end
    return len(case.tokens)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_golden_case_gives_the_official_tokens_in_the_official_steps(family: str, cache: str) -> None:
    """Less the forwards that FreeDave's code runs on blocks that are finished already."""
    for (length, drafts), cases in sorted(_cases(family, cache).items()):
        make = drafting_engine if drafts else engine_of
        llm = make(golden(family), cases[0].options)
        # Of drafts the official code tells acceptances instead of steps.
        params = [params_of(c.options) if drafts else mapped(params_of(c.options)) for c in cases]
        with recorded_rounds(llm) as rounds:
            outputs = generate(llm, [c.prompt for c in cases], params)
        wrong = [
            c.name for c, o in zip(cases, outputs, strict=True) if tokens_of(o)[: _exit(c)] != c.tokens[: _exit(c)]
        ]
        assert not wrong
        forwards, steps = {}, {}
        for case, output in zip(cases, outputs, strict=True):
            ours, official = _forwards(case, output, rounds), case.needed_nfe
            if ours != official:
                forwards[case.name] = (ours, official)
            if not drafts and (found := _other_steps(case, output, length)):
                steps[case.name] = found
        assert not forwards, "(ours, official)"
        assert not steps


def _other_steps(case: BidirectionalCase, output: RequestOutput, length: int) -> list[Any]:
    """Tokens that other steps wrote than the official code's."""
    start = len(case.prompt)
    expected = step_map(case.steps, partial(block_of, start=start, length=length), start)
    return misplaced(output, start, expected, _exit(case))


def _forwards(case: BidirectionalCase, output: RequestOutput, rounds: Counter[tuple[str, int]]) -> int:
    """Forwards up to the block that made the official code stop."""
    end = len(case.prompt) + _exit(case)
    in_time = sum(n for (req_id, start), n in rounds.items() if req_id == output.request_id and start < end)
    assert sum(n for (req_id, _), n in rounds.items() if req_id == output.request_id) == nfe_of(output)
    return in_time


@pytest.mark.parametrize("steps", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_takes_as_many_steps_as_asked_for(family: str, cache: Cache, steps: int) -> None:
    """Dream's first position has a step of its own with a cache, of which no official output is at hand."""
    options = Options(
        mask_id=MASK, gen_length=32, block_length=16, shifted=family == "dream", cache=cache, steps=2 * steps
    )
    llm = engine_of(family, options)
    prompts = [[5, 6, 7], list(range(20, 57))]
    for prompt, output in zip(prompts, generate(llm, prompts, params_of(options)), strict=True):
        expected = decode(bundled(family).model, prompt, options)
        assert tokens_of(output) == expected.tokens
        assert nfe_of(output) == expected.nfe == 2 * steps
