"""What the engine tests share: engines by configuration, requests from golden cases, looks into the scheduler."""

import contextlib
import functools
import gc
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from vllm import LLM, RequestOutput, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from tests import warm
from tests.engine.shared import shared_engine, started_quickly
from tests.paths import BUNDLED
from tests.reference.decode import Options, StepSkipping
from tests.reference.drafts import PSD, FreeDave, Spiffy
from tests.reference.golden import Case, Golden, golden_or_skip, load
from tests.reference.model import ReferenceModel
from vllm_dllm import request_stats
from vllm_dllm.decoding.commits import CommitRows
from vllm_dllm.methods import POLICY_OPTIONS, policy_row
from vllm_dllm.observe.recorder import Round, recording

MASK, EOS = 511, 510
"""Of all checkpoints in ``tests/golden``, for tests with options of their own. Golden tests take both from the data."""

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
    "hf_overrides": {"mask_token_id": MASK},
}
"""Engine options of these tests."""


def golden(family: str) -> Golden:
    """Golden data of a family, of the folder that ``VLLM_DLLM_GOLDEN`` names; skips the test where there is none."""
    return golden_or_skip(load, family)


def bundled(family: str) -> Golden:
    """Golden data of a family in the repository."""
    return load(family, BUNDLED)


def configuration_of(family: str, wanted: tuple[int, int | None]) -> tuple[int, int | None]:
    """Block length and sub-block length of golden cases: the wanted ones, or the commonest where no case has those."""
    try:
        found = Counter((c.options.block_length, c.options.sub_block_length) for c in load(family).cases)
    except FileNotFoundError:
        return wanted
    return wanted if wanted in found else found.most_common(1)[0][0]


def checkpoint_of(model: str | Golden) -> Path:
    return (bundled(model) if isinstance(model, str) else model).checkpoint


def reference_model(model: str | Golden) -> ReferenceModel:
    """The plain model of golden data, or of the repository's data of a family."""
    return _reference_model(checkpoint_of(model))


@functools.cache
def _reference_model(checkpoint: Path) -> ReferenceModel:
    return ReferenceModel(checkpoint)


def engine(
    checkpoint: Path, *, dllm: dict[str, Any] | None = None, async_scheduling: bool = False, **options: Any
) -> LLM:
    """The engine of this configuration; the same one for every test that asks for it."""
    options = {**DEFAULTS, **options, "async_scheduling": async_scheduling}

    def make() -> LLM:
        with pytest.MonkeyPatch.context() as patches:
            if async_scheduling:
                schedule_asynchronously(patches)
            llm = LLM(str(checkpoint), additional_config={"dllm": dllm or {}}, **options)
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == async_scheduling
        return llm

    key = (checkpoint, json.dumps(dllm or {}, sort_keys=True), json.dumps(options, sort_keys=True))
    return shared_engine(key, make)


def engine_of(model: str | Golden, options: Options, *, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    """Engine for requests with these options; what a request may set is left to the request.

    Args:
        model: golden data, or a family of the repository's.
        dllm: further engine options of ours.
    """
    fixed: dict[str, Any] = {"block_length": options.block_length}
    if options.sub_block_length is not None:
        fixed["sub_block_length"] = options.sub_block_length
    more = {"hf_overrides": {"mask_token_id": options.mask_id}, **more}
    return engine(checkpoint_of(model), dllm={**fixed, **(dllm or {})}, **more)


def drafting_engine(model: str | Golden, options: Options, *, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    """The same with room for drafts."""
    return engine_of(model, options, dllm={"max_drafts": 7, **(dllm or {})}, **{"max_num_seqs": 8, **more})


def request_options(options: Options) -> dict[str, Any]:
    """A reference decoder's options as ``extra_args`` of a request."""
    args: dict[str, Any] = {
        "dllm_policy": options.policy,
        "dllm_threshold": options.threshold,
        "dllm_entropy_bound": options.entropy_bound,
        "dllm_relaxed_threshold": options.relaxed_threshold,
        "dllm_radius": options.radius,
        "dllm_eos_early_stop": options.eos_early_stop,
    }
    if options.denoising_steps is None:
        args["dllm_tokens_per_step"] = options.tokens_per_step
    else:
        args["dllm_denoising_steps"] = options.denoising_steps
    if options.edit_threshold != math.inf:
        args["dllm_edit_threshold"] = options.edit_threshold
        args["dllm_max_post_edit_steps"] = options.max_post_edit_steps
    return read_by_policy(args)


def read_by_policy(args: dict[str, Any], *, timesteps: bool = False) -> dict[str, Any]:
    """Of a request's options those that its policy reads; any other would be refused.

    Args:
        timesteps: ``entropy`` is Dream's.
    """
    row = policy_row(args["dllm_policy"], timesteps=timesteps)
    unread = POLICY_OPTIONS - {*row.options}
    return {key: value for key, value in args.items() if key.removeprefix("dllm_") not in unread}


def skipping_options(skipping: StepSkipping | None) -> dict[str, Any]:
    """How a reference decoder drafts and verifies, as ``extra_args`` of a request. Graphs are the engine's."""
    match skipping:
        case None:
            return {"dllm_verify": "none"}
        case FreeDave():
            return {"dllm_verify": "freedave", "dllm_drafts": skipping.d, "dllm_match": skipping.match}
        case Spiffy():
            return {"dllm_verify": "spiffy", "dllm_drafts": skipping.drafts}
        case PSD():
            return {"dllm_verify": "psd", "dllm_drafts": skipping.drafts}
    raise TypeError(skipping)


def greedy(options: Options | None = None, skipping: StepSkipping | None = None, **params: Any) -> SamplingParams:
    """Greedy sampling parameters that go on to ``max_tokens`` unless stop ids are given."""
    defaults: dict[str, Any] = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
    if options is not None:
        defaults["extra_args"] = request_options(options)
        if skipping is not None:
            defaults["extra_args"] |= skipping_options(skipping)
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


def schedule_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that start from now on schedule asynchronously, which vLLM does not do on CPUs."""
    platform = type(current_platform)
    original = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check_and_update_config))


COMMITS = ("beside", "apart", "in turn")
"""Where the rows of commits go under asynchronous scheduling: ``vllm_dllm.decoding.commits``."""


def place_commits(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Have steps place the rows of commits as one of ``COMMITS`` says, whatever steps cost."""
    turns = itertools.count()
    # In turn: steps of both kinds follow each other, and steps of the same kind.
    beside = {"beside": lambda *_: True, "apart": lambda *_: False, "in turn": lambda *_: next(turns) // 2 % 2 == 0}
    monkeypatch.setattr(CommitRows, "beside", beside[where])


@contextlib.contextmanager
def tensor_parallel_engine(checkpoint: Path, *, dllm: dict[str, Any], **options: Any) -> Iterator[LLM]:
    """An engine of two ranks, in processes of their own."""
    # Engines that ran in this process have bound its thread to one processor.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with warm.workers(), started_quickly():
        llm = LLM(
            str(checkpoint),
            tensor_parallel_size=2,
            additional_config={"dllm": {key: value for key, value in dllm.items() if value is not None}},
            **{**DEFAULTS, **options},
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        # It has the garbage collector look again at the other engines of this process, which vLLM had frozen.
        gc.freeze()


def scheduler_of(llm: LLM) -> Scheduler:
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


class Forward(NamedTuple):
    """What a denoising forward saw of a request, as ``reference.decode.Round`` tells it."""

    masked: int
    drafts: int
    accepted: int


@contextlib.contextmanager
def recorded(llm: LLM) -> Iterator[dict[str, list[Forward]]]:
    """Denoising forwards of every request meanwhile, by the request's id."""
    forwards: dict[str, list[Forward]] = {}
    mask_id = llm.llm_engine.vllm_config.model_config.hf_config.mask_token_id

    def note(round_: Round) -> None:
        for index, req_id in enumerate(round_.req_ids):
            if not round_.denoised[index]:
                continue
            generated = round_.branches[index, 0, int(round_.first[index]) :]
            forwards.setdefault(req_id.split("-")[0], []).append(
                Forward(
                    masked=int((generated == mask_id).sum()),
                    drafts=int(round_.present[index].sum()) - 1,
                    accepted=int(round_.accepted[index]),
                )
            )

    with recording(llm, note):
        yield forwards


@contextlib.contextmanager
def recorded_rounds(llm: LLM) -> Iterator[Counter[tuple[str, int]]]:
    """How many denoising forwards each block of each request has meanwhile, by the request's id and its position."""
    forwards: Counter[tuple[str, int]] = Counter()

    def note(round_: Round) -> None:
        for req_id, start, denoised in zip(
            round_.req_ids, round_.block_start.tolist(), round_.denoised.tolist(), strict=True
        ):
            forwards[req_id.split("-")[0], start] += denoised

    with recording(llm, note):
        yield forwards


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


@contextlib.contextmanager
def no_form_is_missing(llm: LLM) -> Iterator[None]:
    """Meanwhile every stage of the engine has a compiled form that fits, or it would run as it is written."""
    served = runner_of(llm).model_state.stages.served
    hits, called = list[bool](), set[str]()

    def note(hit: bool) -> bool:
        hits.append(hit)
        return hit

    def watched(name: str, stage: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            hits.clear()
            result = stage(*args, **kwargs)
            # A function that was never compiled tells nothing.
            assert hits[:1] == [True], name
            called.add(name)
            return result

        return run

    before = set_guard_complete_hook(note)
    try:
        with mock.patch.dict(served, {name: watched(name, stage) for name, stage in served.items()}):
            yield
    finally:
        set_guard_complete_hook(before)
    assert called
