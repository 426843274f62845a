"""Tensor parallel two with Ray workers: the tokens of one rank, whatever happens around a request.

The batteries of one rank lend their requests, of all verifiers and policies; FeF-DLLM joins them. A family has one
engine here, with too few pages for all requests.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams

from tests.engine.harness import engine, free_pages, generate, golden, greedy, preemptions, tokens_of
from tests.engine.runtime import test_full_attention_invariance as full_attention
from tests.engine.runtime import test_step_skipping_invariance as step_skipping
from tests.engine.runtime import test_structured_outputs as structured
from tests.engine.runtime.grammars import write_tokenizer
from tests.stress.scaling.cluster import ray_engine, ray_nodes
from vllm_dllm.patches import PATCHES

pytestmark = pytest.mark.slow

FULL_ATTENTION = ("dream", "dual")
"""Family and cache."""
FAMILIES = {"sdar": 1, "dream": 2, "llada2_moe": 1, "fast_dllm_v2": 2}
"""And over how many nodes of Ray the two ranks of each are spread."""
IN_EVERY_RUN = ("sdar", "dream")
"""The others differ from the first in their layers alone, and take half a minute each."""
MAX_MODEL_LEN = 256
LONG = 33
"""Tokens of a prompt that fills a page."""


class Asked(NamedTuple):
    """A request, and its answer by an engine of one rank that has nothing else to do."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]


class Running(NamedTuple):
    family: str
    llm: LLM
    asked: list[Asked]
    tokenizer: Path


def with_answer(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Asked:
    return Asked(list(prompt), params, tokens_of(generate(llm, [prompt], params)[0]))


def fef(window: int, max_tokens: int) -> SamplingParams:
    return greedy(max_tokens=max_tokens, extra_args={"dllm_verify": "fef", "dllm_window": window})


def asked_of_blocks(family: str) -> list[Asked]:
    requests = [
        request
        for at_least in (0, LONG)
        for request in step_skipping.requests_of(family, at_least=at_least)
        if len(request.case.prompt) + request.case.max_new_tokens <= MAX_MODEL_LEN
    ]
    answers = step_skipping.alone(family, requests)
    asked = [Asked(r.case.prompt, r.params, a.tokens) for r, a in zip(requests, answers, strict=True)]
    llm = step_skipping.engine_for(family)
    window = step_skipping.MAX_DRAFTS
    return asked + [with_answer(llm, each.prompt, fef(window, 24)) for each in asked[::6]]


def asked_of_full_attention() -> list[Asked]:
    llm = full_attention.engine_for(*FULL_ATTENTION)
    # Long answers, so that windows slide and pages run out.
    requests = [r._replace(max_tokens=96) for r in full_attention.requests_of(FULL_ATTENTION[0])]
    asked = [with_answer(llm, r.prompt, r.params) for r in requests]
    window = full_attention.MAX_DRAFTS + 1
    return asked + [with_answer(llm, each.prompt, fef(window, 24)) for each in asked[::6]]


def options_of_blocks(family: str, tokenizer: Path) -> dict[str, Any]:
    length, sub_block = step_skipping.FAMILIES[family]
    return {
        "dllm": {"block_length": length, "sub_block_length": sub_block, "max_drafts": step_skipping.MAX_DRAFTS},
        "hf_overrides": {"mask_token_id": golden(family).mask_id},
        "max_num_seqs": step_skipping.MAX_NUM_SEQS,
        "skip_tokenizer_init": False,
        "tokenizer": str(tokenizer),
    }


@contextmanager
def engine_of_blocks(family: str, tokenizer: Path) -> Iterator[LLM]:
    with ray_engine(
        golden(family).checkpoint,
        **options_of_blocks(family, tokenizer),
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=step_skipping.SCRATCH_PAGES + 12,
    ) as llm:
        yield llm


@contextmanager
def engine_of_full_attention() -> Iterator[LLM]:
    family, cache = FULL_ATTENTION
    alone = full_attention.engine_for(family, cache)
    scratch = full_attention.runner_of(alone).model_state.layout.scratch
    reserved = scratch.max_drafts * full_attention.MAX_NUM_SEQS * scratch.pages_per_draft
    with ray_engine(
        full_attention.bundled(family).checkpoint,
        dllm=full_attention.options_of(cache),
        max_num_seqs=full_attention.MAX_NUM_SEQS,
        max_model_len=full_attention.MAX_MODEL_LEN,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=reserved + 15,
    ) as llm:
        yield llm


def chosen(family: str) -> Any:
    """A family, skipped unless it is asked for where it is not in every run."""
    skipped = family not in IN_EVERY_RUN and os.environ.get("RAY_FAMILIES") != "all"
    return pytest.param(family, marks=pytest.mark.skipif(skipped, reason="asked for with RAY_FAMILIES=all"))


@pytest.fixture(scope="module", params=map(chosen, FAMILIES))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    family, num_nodes = request.param, FAMILIES[request.param]
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    if family == FULL_ATTENTION[0]:
        asked, started = asked_of_full_attention(), engine_of_full_attention()
    else:
        asked, started = asked_of_blocks(family), engine_of_blocks(family, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        # Of the engines in this process, where tests run in several.
        patch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
        with ray_nodes(num_nodes, num_cpus=2 // num_nodes):
            # Ray's own processes have started without it.
            patch.setenv("VLLM_PLUGINS", "vllm_dllm")
            with started as llm:
                yield Running(family, llm, asked, tokenizer)


def test_answers_are_those_of_one_rank_while_requests_preempt_each_other(running: Running) -> None:
    asked = running.asked
    before = free_pages(running.llm)
    with preemptions(running.llm) as preempted:
        outputs = generate(running.llm, [a.prompt for a in asked], [a.params for a in asked])
    assert len(preempted) >= 5
    for each, output in zip(asked, outputs, strict=True):
        assert tokens_of(output) == each.tokens, each.params.extra_args
    running.llm.reset_prefix_cache()
    assert free_pages(running.llm) == before


def test_answers_are_those_of_one_rank_after_hits_in_the_prefix_cache(running: Running) -> None:
    if running.family == FULL_ATTENTION[0]:
        pytest.skip("models with full attention have no prefix cache")
    verifiers = set()
    for each in [a for a in running.asked if len(a.prompt) >= LONG][:6]:
        for hits in (False, True):
            (output,) = generate(running.llm, [each.prompt], each.params)
            assert tokens_of(output) == each.tokens, each.params.extra_args
            assert not hits or output.num_cached_tokens > 0
        verifiers.add(each.params.extra_args.get("dllm_verify"))
    assert len(verifiers) >= 3


def test_structured_outputs_are_those_of_one_rank(running: Running) -> None:
    family, llm, _, tokenizer = running
    if family == FULL_ATTENTION[0]:
        pytest.skip("its engine has no tokenizer")
    alone = engine(golden(family).checkpoint, **options_of_blocks(family, tokenizer))
    requests = structured.mixed(family)
    # Tokens alone: who is preempted, and takes forwards anew, depends on how long each grammar takes to compile.
    assert [*map(tokens_of, structured.run(llm, requests))] == [*map(tokens_of, structured.run(alone, requests))]


def test_every_rank_has_the_plugin_and_processors_of_its_own(running: Running) -> None:
    def describe(worker: Any) -> tuple[str | None, tuple[str, ...], str, set[int], int]:
        import torch

        from vllm_dllm import patches

        runner = type(worker.model_runner).__module__
        return (
            os.environ.get("VLLM_PLUGINS"),
            patches.apply_all(),
            runner,
            os.sched_getaffinity(0),
            torch.get_num_threads(),
        )

    ranks = running.llm.collective_rpc(describe)
    assert len(ranks) == 2
    for plugins, patches, runner, processors, threads in ranks:
        assert plugins == "vllm_dllm"
        assert patches == PATCHES
        assert runner == "vllm.v1.worker.cpu.model_runner"
        assert threads == len(processors)
    # Nodes of these tests share a machine that each takes for its own.
    if FAMILIES[running.family] == 1:
        assert not ranks[0][3] & ranks[1][3]
