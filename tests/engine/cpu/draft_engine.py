"""Generates with a small autoregressive model and a drafter in this process and prints what came of it, as JSON.

``python tests/engine/cpu/draft_engine.py [--drafts greedy|probabilistic]``

Run in a process of its own, with ``VLLM_USE_V2_MODEL_RUNNER=1``.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

VOCAB = 8
PROMPTS = [[5, 6, 7, 2, 3], [1, 2, 3], [t % VOCAB for t in range(40)], [(3 * t) % VOCAB for t in range(130)]]
DRAWS = 600
PROMPT = PROMPTS[1]


def make_models() -> "tuple[Qwen3ForCausalLM, Qwen3ForCausalLM]":
    """Return a random Qwen3 with decided opinions and a drafter that shares most of them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
        eos_token_id=None,
        bos_token_id=None,
    )
    target, drafter = Qwen3ForCausalLM(config).float().eval(), Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for own, others in zip(drafter.parameters(), target.parameters(), strict=True):
            own.copy_(others + 0.35 * others.std() * torch.randn_like(others) if others.dim() > 1 else others)
    return target, drafter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafts", choices=["greedy", "probabilistic"], help="how the drafter proposes, if at all")
    options = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.outputs import CompletionOutput

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, name)) for name in ("target", "drafter")]
        for model, path in zip(make_models(), paths, strict=True):
            model.save_pretrained(path)
        speculation = {
            "method": "draft_model",
            "model": paths[1],
            "num_speculative_tokens": 3,
            "draft_sample_method": options.drafts,
        }
        llm = LLM(
            paths[0],
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_batched_tokens=128,  # the longest prompt comes in chunks
            max_num_seqs=32,
            enforce_eager=True,
            kv_cache_memory_bytes=32 * 2**20,
            disable_log_stats=False,
            speculative_config=speculation if options.drafts else None,
        )

    def generate(prompts: list[list[int]], sampling: list[SamplingParams] | SamplingParams) -> list[CompletionOutput]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0] for output in llm.generate(inputs, sampling, use_tqdm=False)]

    def token_ids(outputs: list[CompletionOutput]) -> list[list[int]]:
        return [list(output.token_ids) for output in outputs]

    common = {"detokenize": False, "ignore_eos": True}
    greedy = SamplingParams(temperature=0, max_tokens=32, **common)
    scored = SamplingParams(temperature=0, max_tokens=12, logprobs=2, **common)
    drawn = [SamplingParams(temperature=1, max_tokens=3, seed=seed, **common) for seed in range(DRAWS)]
    with_logprobs = generate(PROMPTS, scored)
    report = {
        "greedy": token_ids(generate(PROMPTS, greedy)),
        "scored": token_ids(with_logprobs),
        "logprobs": [
            [scores[token].logprob for token, scores in zip(output.token_ids, output.logprobs, strict=True)]
            for output in with_logprobs
        ],
        "drawn": token_ids(generate([PROMPT] * DRAWS, drawn)),
        "runner": type(llm.llm_engine.model_executor.driver_worker.worker.model_runner).__module__,
    }
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        report[name] = counters.get(f"vllm:spec_decode_{name}", 0)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
