"""What the host takes for a step: engines of the bundled models, whose forward costs nothing meanwhile.

Steps are scheduled asynchronously and compiled, as on a GPU. ``python benchmarks/host.py --help``.
"""

import os
import time
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from environment import make_console
from record import CHECKPOINTS
from rich.table import Table

if TYPE_CHECKING:
    from vllm import LLM

PROMPT_TOKENS, MAX_TOKENS = 64, 900
UNTIMED_STEPS = 40
"""Steps that prefill, and that have kernels chosen."""


def schedule_asynchronously() -> None:
    """Have engines schedule asynchronously, which vLLM does not do on CPUs."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    original = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_and_update_config)


def start(*, diffusion: bool, concurrency: int) -> "LLM":
    """The engine of `tiny-sdar`, which unmasks a token per step, or of the autoregressive `tiny-qwen2`."""
    from vllm import LLM

    dllm = {"policy": "static", "tokens_per_step": 1, "compile_steps": True}
    return LLM(
        str(CHECKPOINTS / ("tiny-sdar" if diffusion else "tiny-qwen2")),
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=1024,
        max_num_seqs=max(2, concurrency),
        skip_tokenizer_init=True,
        additional_config={"dllm": dllm} if diffusion else {},
    )


def milliseconds(llm: "LLM", concurrency: int, steps: int) -> float:
    """The median step of so many requests, the hidden states of all rows being zeros."""
    import torch
    from vllm import SamplingParams

    engine: Any = llm.llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    hidden = torch.zeros(4096, runner.model_config.get_hidden_size(), dtype=torch.bfloat16)
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=[3], detokenize=False
    )
    for index in range(concurrency):
        engine.add_request(str(index), {"prompt_token_ids": [5 + index] * PROMPT_TOKENS}, params)
    runner.model.forward = lambda input_ids, *_, **__: hidden[: len(input_ids)]
    seconds = []
    for _ in range(UNTIMED_STEPS + steps):
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    assert len(engine.engine_core.engine_core.scheduler.running) == concurrency, "requests ended"
    return median(seconds[UNTIMED_STEPS:]) * 1e3


def main(
    concurrency: Annotated[list[int], typer.Option(min=1, help="Concurrent requests; repeatable.")] = [1, 8],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, max=800, help="Timed steps.")] = 500,
) -> None:
    """Time the host's work for a step, of diffusion and of vLLM's autoregression."""
    # In one process the steps of an engine can be timed, and threads would take more time than they save.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    schedule_asynchronously()
    table = Table("requests", "diffusion, ms", "autoregression, ms", "ratio", title="What the host takes for a step")
    for number in concurrency:
        own, others = (milliseconds(start(diffusion=each, concurrency=number), number, steps) for each in (True, False))
        table.add_row(str(number), f"{own:.2f}", f"{others:.2f}", f"{own / others:.2f}")
    make_console().print(table)


if __name__ == "__main__":
    typer.run(main)
