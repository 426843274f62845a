"""Several requests with policies of their own in one batch, and what each cost.

python examples/offline.py [MODEL]
"""

import sys

from vllm import LLM, SamplingParams

from vllm_dllm import request_stats

QUESTION = "Ada has 12 apples. Ben gives Ada 7 more. How many apples does Ada have now?"

POLICIES = {
    "one token per step": {"dllm_policy": "static"},
    "four tokens per step": {"dllm_policy": "static", "dllm_tokens_per_step": 4},
    "confidence above 0.9": {"dllm_policy": "threshold", "dllm_threshold": 0.9},
    "1.5 nats per step": {"dllm_policy": "entropy", "dllm_entropy_bound": 1.5},
    "left to right": {"dllm_policy": "sequential"},
}


def main(model: str) -> None:
    llm = LLM(model, max_model_len=-1, kv_cache_memory_bytes=1 << 30, enforce_eager=True)
    params = [SamplingParams(temperature=0, max_tokens=64, extra_args=options) for options in POLICIES.values()]
    outputs = llm.chat([[{"role": "user", "content": QUESTION}]] * len(params), params)
    for policy, output in zip(POLICIES, outputs, strict=True):
        stats = request_stats(output)
        print(f"{policy}: {stats.committed_tokens} tokens in {stats.nfe} forwards\n{output.outputs[0].text}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints/tiny-sdar")
