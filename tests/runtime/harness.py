"""What the engine tests share: engines by configuration, requests from golden cases, looks into the scheduler."""

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference.decode import Options
from reference.golden import Case, Golden, load
from reference.model import ReferenceModel
from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_dllm import request_stats

MASK, EOS = 511, 510
"""Of all golden checkpoints."""


@functools.cache
def golden(family: str) -> Golden:
    """Golden data of a family; skips the test where there is none."""
    try:
        return load(family)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@functools.cache
def reference_model(family: str) -> ReferenceModel:
    return ReferenceModel(golden(family).checkpoint)


def engine(checkpoint: Path, *, dllm: dict[str, Any] | None = None, **options: Any) -> LLM:
    """The engine of this configuration; the same one for every test that asks for it."""
    return _engine(checkpoint, json.dumps(dllm or {}), json.dumps(options))


@functools.cache
def _engine(checkpoint: Path, dllm: str, options: str) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "skip_tokenizer_init": True,
        "hf_overrides": {"mask_token_id": MASK},
    }
    return LLM(str(checkpoint), additional_config={"dllm": json.loads(dllm)}, **{**defaults, **json.loads(options)})


def engine_of(family: str, options: Options, **more: Any) -> LLM:
    """Engine for golden cases with these options; what a request may set is left to the request."""
    dllm = {"block_length": options.block_length}
    if options.sub_block_length is not None:
        dllm["sub_block_length"] = options.sub_block_length
    return engine(golden(family).checkpoint, dllm=dllm, **more)


def request_options(options: Options) -> dict[str, Any]:
    """A reference decoder's options as ``extra_args`` of a request."""
    args: dict[str, Any] = {
        "dllm_policy": options.policy,
        "dllm_threshold": options.threshold,
        "dllm_entropy_bound": options.entropy_bound,
        "dllm_eos_early_stop": options.eos_early_stop,
    }
    if options.denoising_steps is None:
        args["dllm_tokens_per_step"] = options.tokens_per_step
    else:
        args["dllm_denoising_steps"] = options.denoising_steps
    if options.edit_threshold != math.inf:
        args["dllm_edit_threshold"] = options.edit_threshold
        args["dllm_max_post_edit_steps"] = options.max_post_edit_steps
    return args


def greedy(options: Options | None = None, **params: Any) -> SamplingParams:
    """Greedy sampling parameters that go on to ``max_tokens`` unless stop ids are given."""
    defaults: dict[str, Any] = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
    if options is not None:
        defaults["extra_args"] = request_options(options)
        defaults["stop_token_ids"] = sorted(options.stop_ids)
    return SamplingParams(**{**defaults, **params})


def case_params(case: Case) -> SamplingParams:
    return greedy(case.options, max_tokens=case.max_new_tokens)


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def nfe_of(output: RequestOutput) -> int:
    return request_stats(output).nfe


def scheduler_of(llm: LLM) -> Scheduler:
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def free_pages(llm: LLM) -> int:
    return scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()


@contextlib.contextmanager
def preemptions(llm: LLM) -> Iterator[list[str]]:
    """Ids of the requests that the engine preempts meanwhile, in order."""
    scheduler, preempted = scheduler_of(llm), []
    original = scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(request, *args, **kwargs)

    scheduler._preempt_request = note
    try:
        yield preempted
    finally:
        del scheduler._preempt_request


def assert_nothing_left(llm: LLM, free_pages_before: int) -> None:
    """No request, no slot and no page is held by anybody."""
    # Slots of finished requests are given back with the next step that runs.
    generate(llm, [[1, 2, 3]], greedy(max_tokens=1))
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    assert not scheduler.requests
    assert not scheduler.running
    assert runner.req_states.num_reqs <= 1
    assert free_pages(llm) == free_pages_before
