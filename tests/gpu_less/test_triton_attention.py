"""Golden cases through vLLM's Triton attention, the backend that float32 has on a GPU, in Triton's interpreter.

The engine is a CPU engine with that backend in the place of the CPU's own, so what is checked is what the backend makes
of groups of rows that see each other, of masks per group, and of scratch pages.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from tests.engine import full_attention
from tests.engine.harness import (
    case_params,
    drafting_engine,
    engine_of,
    generate,
    golden,
    nfe_of,
    runner_of,
    tokens_of,
)
from vllm_dllm.runtime.scheduling.timing import StartSteps

CONFIGURATIONS = {"sdar": (4, None), "llada2_moe": (8, None), "fast_dllm_v2": (8, 4)}
"""Block length and sub-block length of each family's engine."""


@pytest.fixture(autouse=True)
def triton_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def get_attn_backend_cls(*_: object, **__: object) -> str:
        return AttentionBackendEnum.TRITON_ATTN.get_path()

    # It decides how large the tiles of a kernel are.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", get_attn_backend_cls)
    # In the interpreter, the steps that are timed at the start take minutes.
    monkeypatch.setattr(StartSteps, "take", lambda *_, **__: None)
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()


def assert_triton(llm: LLM) -> None:
    ((group,),) = runner_of(llm).attn_groups
    assert group.backend is TritonAttentionBackend


def cheapest(cases: Iterable[Any], number: int) -> list[Any]:
    """The interpreter takes its time for every forward and every position."""
    return sorted(cases, key=lambda case: case.nfe * (len(case.prompt) + len(case.tokens)))[:number]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_blocks_that_do_not_see_what_is_after_them(family: str, drafts: int) -> None:
    fixed = CONFIGURATIONS[family]
    cases = [c for c in golden(family).cases if (c.options.block_length, c.options.sub_block_length) == fixed]
    cases = cheapest(cases, 1 if drafts else 2)
    options = cases[0].options
    # `seed` only sets these engines apart from those of other tests.
    llm = (drafting_engine if drafts else engine_of)(golden(family), options, seed=21)
    assert_triton(llm)
    params = [case_params(case) for case in cases]
    if drafts:
        for each in params:
            each.extra_args |= {"dllm_verify": "freedave", "dllm_drafts": drafts + 1}
    outputs = generate(llm, [c.prompt for c in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == case.tokens, case.name
        assert nfe_of(output) <= case.nfe if drafts else nfe_of(output) == case.nfe, case.name


@pytest.mark.parametrize(("family", "verify"), [("llada", "none"), ("dream", "freedave")])
def test_blocks_that_see_the_whole_text(family: str, verify: str) -> None:
    golden, drafts = full_attention.golden(family), 1 if verify == "freedave" else None
    cases = [c for c in golden.cases if c.cache == "dual" and c.options.verify == verify and len(c.prompt) == 1]
    (case,) = cheapest((c for c in cases if drafts is None or c.options.drafts == drafts + 1), 1)
    llm = full_attention.engine_of(golden, case.options, dllm={"max_drafts": drafts}, seed=21)
    assert_triton(llm)
    (output,) = generate(llm, [case.prompt], [full_attention.params_of(case.options)])
    assert tokens_of(output) == case.tokens
