"""The systems that are compared. Each is measured in a process of its own: ``python systems.py < job``.

A job comes in on standard input and events go out on standard output, both as JSON, one line each.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


class System(StrEnum):
    """What is compared."""

    HF_LOOP = "hf-loop"
    """Block diffusion as SDAR's own script does it, in Transformers."""
    DLLM = "vllm-dllm"
    """Block diffusion in vLLM, by this plugin."""
    AR = "vllm-ar"
    """vLLM without plugins, decoding the same weights autoregressively."""
    AR_PLUGIN = "vllm-ar-plugin"
    """The same with the plugin installed."""

    @property
    def is_diffusion(self) -> bool:
        """Whether it decodes by diffusion."""
        return self in (System.HF_LOOP, System.DLLM)


Once = Callable[["Run", list["Request"]], "Pass"]
"""Does a run's requests once."""

KV_CACHE_BYTES = 1 << 30
WARM_UP_REQUESTS = 2


@dataclass(frozen=True)
class Request:
    """One prompt, and how many tokens it gets unless a stop token ends it."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Policy:
    """How a diffusion model unmasks; ``threshold`` is ``None`` for one token per step."""

    name: str
    threshold: float | None

    def extra_args(self) -> dict[str, str | float]:
        """The policy as options of a request to the engine."""
        if self.threshold is None:
            return {"dllm_policy": "static", "dllm_tokens_per_step": 1}
        return {"dllm_policy": "threshold", "dllm_threshold": self.threshold}


@dataclass(frozen=True)
class Run:
    """One row of the result: all requests, ``concurrency`` of them at a time.

    ``policy`` is ``None`` for autoregressive decoding.
    """

    policy: Policy | None
    concurrency: int


@dataclass(frozen=True)
class Job:
    """What a process measures.

    Attributes:
        checkpoint: of SDAR for the engine, of its Qwen3 backbone for the others.
        eager: run the model without ``torch.compile``. The Transformers loop always does.
        seconds_per_run: repeat a run only while it has taken less than this, but at least once.
    """

    system: System
    checkpoint: str
    block_length: int
    mask_token_id: int
    stop_token_ids: list[int]
    requests: list[Request]
    runs: list[Run]
    dtype: str
    eager: bool
    repetitions: int
    seconds_per_run: float

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Job":
        """The inverse of :meth:`to_json`."""
        values = json.loads(line)
        for run in values["runs"]:
            run["policy"] = run["policy"] and Policy(**run["policy"])
        runs = [Run(**run) for run in values["runs"]]
        requests = [Request(**request) for request in values["requests"]]
        return cls(**{**values, "runs": runs, "requests": requests})


@dataclass(frozen=True)
class Pass:
    """One repetition of a run.

    Attributes:
        seconds: wall time.
        step_seconds: of a model step, and of everything that goes with it, at full concurrency.
        tokens: generated tokens of each request.
        nfe: model forwards of each request after its prefill.
    """

    seconds: float
    step_seconds: float
    tokens: list[list[int]]
    nfe: list[int]


@dataclass(frozen=True)
class Measured:
    """A run with all its repetitions; tokens and NFE are those of the last."""

    seconds: list[float]
    step_seconds: list[float]
    tokens: list[list[int]]
    nfe: list[int]


def repeat(once: Callable[[], Pass], repetitions: int, seconds: float) -> Measured:
    """Repeat a run until it was done ``repetitions`` times or has taken ``seconds``."""
    passes = [once()]
    while len(passes) < repetitions and sum(done.seconds for done in passes) < seconds:
        passes.append(once())
    return Measured(
        seconds=[done.seconds for done in passes],
        step_seconds=[done.step_seconds for done in passes],
        tokens=passes[-1].tokens,
        nfe=passes[-1].nfe,
    )


def load_hf_loop(job: Job) -> tuple[dict[str, Any], Once]:
    """Facts about the Transformers loop, and the function that runs it."""
    import hf_loop
    import torch

    model = hf_loop.load(Path(job.checkpoint), job.dtype)
    stop_token_ids = frozenset(job.stop_token_ids)

    def once(run: Run, requests: list[Request]) -> Pass:
        assert run.policy is not None
        begin = time.perf_counter()
        decoded = [
            hf_loop.generate(
                model,
                request.prompt,
                request.max_tokens,
                block_length=job.block_length,
                mask_token_id=job.mask_token_id,
                stop_token_ids=stop_token_ids,
                threshold=run.policy.threshold,
            )
            for request in requests
        ]
        seconds = time.perf_counter() - begin
        nfe = [request.nfe for request in decoded]
        return Pass(seconds, seconds / sum(nfe), [request.tokens for request in decoded], nfe)

    return {"threads": torch.get_num_threads()}, once


def load_vllm(job: Job) -> tuple[dict[str, Any], Once]:
    """Facts about vLLM as it runs here, and the function that runs it."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = {"dllm": {"block_length": job.block_length}} if job.system == System.DLLM else {}
    llm = LLM(
        job.checkpoint,
        dtype=job.dtype,
        enforce_eager=job.eager,
        max_model_len=-1,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        additional_config=options,
        use_tqdm_on_load=False,
    )

    def sampling_params(policy: Policy | None, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=job.stop_token_ids if policy is not None else None,
            ignore_eos=policy is None or not job.stop_token_ids,
            extra_args=None if policy is None else policy.extra_args(),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def once(run: Run, requests: list[Request]) -> Pass:
        # The default, prefix caching, stays on, but a repetition must not find what the one before it left.
        llm.reset_prefix_cache()
        params = [sampling_params(run.policy, request.max_tokens) for request in requests]
        return serve(llm, [request.prompt for request in requests], params, run.concurrency)

    facts = {
        "threads": torch.get_num_threads(),
        "model_runner": "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1",
        "plugin_loaded": "vllm_dllm.plugin" in sys.modules,
    }
    return facts, once


def serve(llm: "LLM", prompts: list[list[int]], params: "list[SamplingParams]", concurrency: int) -> Pass:
    """Run all requests, ``concurrency`` at a time, and count their forwards."""
    seconds, steps, outputs = finish(llm, prompts, params, concurrency)
    return Pass(
        seconds=seconds,
        # Most steps decode; the median leaves out those that prefill.
        step_seconds=median(steps),
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        nfe=[count_forwards(output) for output in outputs],
    )


def finish(
    llm: "LLM", prompts: list[list[int]], params: "list[SamplingParams]", concurrency: int
) -> "tuple[float, list[float], list[RequestOutput]]":
    """Run all requests, ``concurrency`` at a time: the next one enters as soon as one has finished.

    Returns:
        Seconds of all requests, seconds of each step at full concurrency, and the outputs in the requests' order.
    """
    engine = llm.llm_engine
    waiting = deque(enumerate(zip(prompts, params, strict=True)))
    finished: dict[int, RequestOutput] = {}
    steps: list[float] = []
    in_flight = 0
    begin = time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < concurrency:
            index, (prompt, request_params) = waiting.popleft()
            engine.add_request(str(index), {"prompt_token_ids": prompt}, request_params)
            in_flight += 1
        full = in_flight == concurrency
        step_begin = time.perf_counter()
        outputs = engine.step()
        if full:
            steps.append(time.perf_counter() - step_begin)
        for output in outputs:
            if output.finished:
                finished[int(output.request_id)] = output
                in_flight -= 1
    seconds = time.perf_counter() - begin
    return seconds, steps, [finished[index] for index in range(len(prompts))]


def count_forwards(output: "RequestOutput") -> int:
    """Model forwards of a finished request after its prefill."""
    completion = output.outputs[0]
    if completion.spec_decode_metrics is None:
        # Autoregressive: the prefill gives the first token, and each forward after it one more.
        return len(completion.token_ids) - 1
    from vllm_dllm import request_stats

    return request_stats(output).nfe


def main() -> None:
    """Do the job on standard input."""
    # Libraries print what they like to standard output; the events keep it for themselves.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    job = Job.from_json(sys.stdin.readline())
    facts, once = (load_hf_loop if job.system == System.HF_LOOP else load_vllm)(job)
    print(json.dumps(facts), file=events)
    for run in job.runs:
        once(Run(run.policy, 1), job.requests[:WARM_UP_REQUESTS])
        measured = repeat(partial(once, run, job.requests), job.repetitions, job.seconds_per_run)
        print(json.dumps(asdict(measured)), file=events)


if __name__ == "__main__":
    main()
