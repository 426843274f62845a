"""One cell of the GPU benchmark, in a process of its own: ``python gpu_worker.py < job``.

A job comes in on standard input and events go out on standard output, both as JSON, one line each: first facts about
the engine, or why it refuses, then an event for each level, number of drafts or golden run. ``gpu_worker.py card``
measures the device instead.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_cells import DRAFTS, END, Cell, Dtype, Graphs, Job, Kind, KVDtype, Scheduling, Steps
from gpu_probe import measure_card, runner_of
from gpu_shapes import AUTOREGRESSIVE_LLADA2
from gpu_sharing import hold
from gpu_steps import MAX_MODEL_LEN, freedave_depth, sampling, speeds, verifying
from record import ROOT
from systems import System

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

SMALL_KV_CACHE_BYTES = 256 << 20
"""Of engines on a CPU, and of the bundled models."""
SMALL_MEMORY_UTILIZATION = 0.05
"""Of engines that share a device."""
UNIFORM = "uniform_int32"
"""The strategy of `spread_experts`, in vLLM's registry."""
FULL_GRAPHS = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
CARD_BYTES = 2 << 30
CARD_MATRIX = 8192


class Refused(Exception):
    """The engine does not do what a cell asks for."""


def start(job: Job) -> "tuple[LLM, dict[str, Any]]":
    """The engine of a job, and facts about it.

    Raises:
        Refused: the engine does not start with these options, or starts with others.
    """
    cell = job.cell
    if cell.dtype == Dtype.FLOAT32:
        # Or Triton would round the products of vLLM's attention to TF32.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    from vllm import LLM
    from vllm.platforms import current_platform

    options: dict[str, Any] = {}
    if cell.system == System.DLLM:
        options["additional_config"] = {"dllm": engine_options(cell)}
    else:
        register_autoregressive_configs()
    if cell.graphs in (Graphs.PIECEWISE, Graphs.FULL):
        mode = "PIECEWISE" if cell.graphs == Graphs.PIECEWISE else "FULL_AND_PIECEWISE"
        options["compilation_config"] = {"cudagraph_mode": mode}
    if current_platform.is_cpu() or not job.dummy:
        options["kv_cache_memory_bytes"] = SMALL_KV_CACHE_BYTES
    elif job.kv_bytes:
        options["kv_cache_memory_bytes"] = job.kv_bytes
    if not current_platform.is_cpu() and (job.kv_bytes or not job.dummy):
        # vLLM asks for so much to be free, and such engines share the device.
        options["gpu_memory_utilization"] = SMALL_MEMORY_UTILIZATION
    if cell.kind == Kind.GOLDEN:
        options["hf_overrides"] = {"mask_token_id": golden_data().mask_id}
    if job.dummy and "num_experts" in json.loads((Path(job.checkpoint) / "config.json").read_text()):
        spread_experts()
    scheduling = {Scheduling.DEFAULT: None, Scheduling.SYNC: False, Scheduling.ASYNC: True}[cell.scheduling]
    begin = time.perf_counter()
    try:
        llm = LLM(
            job.checkpoint,
            dtype=cell.dtype.value,
            kv_cache_dtype=cell.kv_dtype.value,
            load_format="dummy" if job.dummy else "auto",
            enforce_eager=cell.is_eager,
            async_scheduling=scheduling,
            # -1: as long as the model's positions and the K/V pages allow.
            max_model_len=MAX_MODEL_LEN if job.dummy else -1,
            max_num_seqs=max((level.concurrency for level in cell.levels), default=job.requests),
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            **options,
        )
    except (ValueError, NotImplementedError) as error:
        # With too little memory for K/V, the engine would if it could.
        if "memory" in str(error):
            raise
        raise Refused(str(error)) from error
    facts = {"start_seconds": round(time.perf_counter() - begin, 1), **describe(llm)}
    if difference := refusal(cell, facts):
        raise Refused(difference)
    return llm, facts


def engine_options(cell: Cell) -> dict[str, Any]:
    """The plugin's engine options: what the requests of a cell ask for too, as the steps of other requests than the
    engine's own are not compiled."""
    options: dict[str, Any] = {"block_length": cell.block_length, "max_drafts": cell.drafts}
    if cell.kind == Kind.SPEED:
        options |= {"policy": "static", "tokens_per_step": cell.levels[0].tokens_per_step}
    if cell.drafts:
        options |= {"verify": "freedave", "drafts": freedave_depth(cell.drafts)}
    if cell.steps != Steps.DEFAULT:
        options["compile_steps"] = cell.steps == Steps.COMPILED
    return options


def register_autoregressive_configs() -> None:
    """Have Transformers read the configurations of backbones that neither it nor vLLM knows, and this plugin does not
    register where it is off."""
    from transformers import AutoConfig, PreTrainedConfig

    class BailingMoeV2Config(PreTrainedConfig):
        model_type = AUTOREGRESSIVE_LLADA2

    AutoConfig.register(AUTOREGRESSIVE_LLADA2, BailingMoeV2Config, exist_ok=True)


def spread_experts() -> None:
    """Have rows choose experts independently, all experts alike, as the rows of a trained model about do. With weights
    made on the spot, all masked rows would choose the same few, and a forward would read a part of what it has to."""
    from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulator

    class Uniform(simulator.DistributionBasedRouting):
        def route_tokens(self, *args: Any, indices_type: torch.dtype | None = None, **kwargs: Any) -> Any:
            # What vLLM's own routers give; some kernels take no other.
            return super().route_tokens(*args, indices_type=indices_type or torch.int32, **kwargs)

    simulator.RoutingSimulator.register_strategy(UNIFORM, Uniform("uniform"))
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = UNIFORM


def describe(llm: "LLM") -> dict[str, Any]:
    """What the engine turned out to be."""
    config, runner = llm.llm_engine.vllm_config, runner_of(llm)
    mode = runner.compilation_config.cudagraph_mode
    geometry = getattr(config.model_config.hf_config, "geometry", None)
    return {
        "graphs": "NONE" if mode is None else mode.name,
        "compile_steps": geometry is not None and bool(geometry.options.compile_steps),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "attention": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
        "plugin_loaded": "vllm_dllm.plugin" in sys.modules,
        "kv_positions": (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        "memory_bytes": torch.cuda.memory_reserved() if runner.device.type == "cuda" else 0,
        "parameter_bytes": sum(parameter.nbytes for parameter in runner.model.parameters()),
    }


def refusal(cell: Cell, facts: dict[str, Any]) -> str:
    """In what the engine differs from what the cell asks for; empty if in nothing."""
    graphs, is_async = facts["graphs"], facts["async_scheduling"]
    right = {
        Graphs.DEFAULT: True,
        Graphs.EAGER: graphs == "NONE",
        Graphs.PIECEWISE: graphs == "PIECEWISE",
        Graphs.FULL: graphs in FULL_GRAPHS,
    }
    if not right[cell.graphs]:
        return f"asked for {cell.graphs} CUDA graphs, the engine runs with cudagraph_mode={graphs}"
    if cell.scheduling != Scheduling.DEFAULT and is_async != (cell.scheduling == Scheduling.ASYNC):
        return f"asked for {cell.scheduling} scheduling, the engine runs with async_scheduling={is_async}"
    if cell.kv_dtype != KVDtype.AUTO and cell.kv_dtype.value not in facts["kv_dtype"]:
        return f"asked for K/V in {cell.kv_dtype}, the engine keeps them in {facts['kv_dtype']}"
    return ""


# Kind.TOKENS and Kind.GOLDEN


def answers(llm: "LLM", job: Job) -> Iterator[dict[str, Any]]:
    """Tokens of the held-out problems with each number of drafts."""
    from workload import arithmetic

    problems = arithmetic(job.cell.model, Path(job.checkpoint), job.requests, 64, None)
    for drafts in (number for number in DRAFTS if number <= job.cell.drafts):
        params = [
            sampling(request.max_tokens, verifying(drafts), stop_token_ids=problems.stop_token_ids)
            for request in problems.requests
        ]
        yield {"drafts": drafts, "tokens": decode(llm, [request.prompt for request in problems.requests], params)}


def golden_data() -> Any:
    """SDAR's golden cases, which the tests of this repository translate into this project's options."""
    sys.path.insert(0, str(ROOT))
    from tests.reference.golden import load

    return load("sdar")


def golden_runs(llm: "LLM", job: Job) -> Iterator[dict[str, Any]]:
    """Golden cases of one block length."""
    golden = golden_data()
    from tests.engine.harness import case_params

    cases = [case for case in golden.cases if case.options.block_length == job.cell.block_length]
    decoded = decode(llm, [case.prompt for case in cases], [case_params(case) for case in cases])
    wrong = [case.name for case, tokens in zip(cases, decoded, strict=True) if case.tokens != tokens]
    yield {"compared": len(cases), "equal": len(cases) - len(wrong), "wrong": wrong}


def decode(llm: "LLM", prompts: Sequence[list[int]], params: "Sequence[SamplingParams]") -> list[list[int]]:
    """Tokens of all requests, which decode together. None finds another's in the prefix cache."""
    llm.reset_prefix_cache()
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]


def run(llm: "LLM", job: Job) -> Iterator[dict[str, Any]]:
    """What a job's engine is there for."""
    match job.cell.kind:
        case Kind.SPEED:
            yield from speeds(llm, job)
        case Kind.TOKENS:
            yield from answers(llm, job)
        case Kind.GOLDEN:
            yield from golden_runs(llm, job)


def main() -> None:
    """Do the job on standard input, or measure the device."""
    # Libraries print what they like to standard output; the events keep it for themselves.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events)

    if sys.argv[1:] == ["card"]:
        card = measure_card(torch.device("cuda"), torch.bfloat16, num_bytes=CARD_BYTES, size=CARD_MATRIX)
        tell(asdict(card))
        return
    job = Job.from_json(sys.stdin.readline())
    try:
        with hold(job.lock, alone=False):
            llm, facts = start(job)
    except Refused as refused:
        tell({"refused": str(refused)})
        return
    tell(facts)
    with hold(job.lock, alone=job.cell.kind == Kind.SPEED):
        for event in run(llm, job):
            tell(event)
    tell(END)
    sys.stderr.flush()
    # vLLM takes seconds to end an engine whose memory the system frees anyway.
    os._exit(0)


if __name__ == "__main__":
    main()
