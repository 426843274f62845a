"""How many problems a tiny model solves, measured by the engine."""

from collections.abc import Sequence
from pathlib import Path

from vllm_dllm.tiny.arithmetic import Problem
from vllm_dllm.tiny.forms import is_right
from vllm_dllm.tiny.text import render_prompt
from vllm_dllm.training.layouts import read_config

_POLICIES = {
    "static, one token per step": {"dllm_policy": "static"},
    "threshold 0.9": {"dllm_policy": "threshold", "dllm_threshold": 0.9},
}


def solve(folder: Path, problems: Sequence[Problem]) -> dict[str, tuple[float, float]]:
    """Answer problems greedily, a diffusion model under two policies: share of right answers and tokens per forward."""
    from vllm import LLM, SamplingParams

    from vllm_dllm import request_stats

    diffuses = "mask_token_id" in read_config(folder)
    memory = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 32}
    llm = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=512, **memory)
    prompts = [render_prompt(problem.question, problem.tools) for problem in problems]
    figures = {}
    for policy, options in _POLICIES.items() if diffuses else [("greedy", None)]:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=64 if diffuses else 128, extra_args=options)
        )
        texts = [output.outputs[0].text for output in outputs]
        right = sum(is_right(text, problem) for text, problem in zip(texts, problems, strict=True))
        costs = [request_stats(output) for output in outputs] if diffuses else []
        speed = sum(cost.committed_tokens for cost in costs) / sum(cost.nfe for cost in costs) if diffuses else 1.0
        figures[policy] = right / len(problems), speed
    llm.llm_engine.engine_core.shutdown()
    return figures
