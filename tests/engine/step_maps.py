"""What the tests of step maps share."""

import math
from functools import partial
from typing import Any

from vllm import RequestOutput, SamplingParams

from tests.engine.harness import tokens_of
from tests.reference.golden import Case
from tests.reference.step_map import Expected, step_map
from vllm_dllm import StepMap, request_stats


def mapped(params: SamplingParams) -> SamplingParams:
    """The same parameters, and a step map."""
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), "dllm_step_map": True}
    return params


def map_of(output: RequestOutput) -> StepMap:
    """The step map of an answer, which has an entry for every token."""
    found = request_stats(output).step_map
    assert found is not None
    assert len(found.steps) == len(found.blocks) == len(found.forwards) == len(tokens_of(output))
    return found


def block_of(position: int, *, start: int, length: int) -> int:
    return (position - start) // length


def expected_of(case: Case) -> Expected:
    """What the official implementation's steps say."""
    start = len(case.prompt) if case.options.causal_context else 0
    return step_map(
        case.steps,
        partial(block_of, start=start, length=case.options.block_length),
        len(case.prompt),
        carried=case.carried,
        shifted=case.options.carries,
        edits=case.options.edit_threshold != math.inf,
    )


def misplaced(output: RequestOutput, start: int, expected: Expected, end: int | None = None) -> list[Any]:
    """Tokens of an answer that came to their places otherwise than expected.

    Args:
        start: position of the first one.
        end: index of the token to stop at.

    Returns:
        (index, ours, expected), where the latter are step, forward and block.
    """
    found = map_of(output)
    ours = list(zip(found.steps, found.forwards, found.blocks, strict=True))[:end]
    wrong = []
    for index, place in enumerate(ours):
        position = start + index
        official = expected.steps[position], expected.forwards[position], expected.blocks[position]
        if place != official:
            wrong.append((index, place, official))
    return wrong
