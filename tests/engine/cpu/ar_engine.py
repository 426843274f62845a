"""Generates with a small autoregressive model in this process and prints what came of it, as JSON.

``python tests/engine/cpu/ar_engine.py [--interpreter] [--steps N]``

Run in a process of its own: which model runner serves the model is a matter of the environment
(``VLLM_USE_V2_MODEL_RUNNER``, ``VLLM_PLUGINS``).
"""

import argparse
import json
import os
import tempfile
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

PROMPTS = [[5, 6, 7, 8, 9], [9, 10, 11], list(range(30, 71)), list(range(100, 231))]


def make_checkpoint(path: str) -> None:
    """Write a random Qwen3 of two layers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=1,
        bos_token_id=0,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interpreter", action="store_true", help="leave all kernels to the interpreter")
    parser.add_argument("--steps", type=int, default=0, help="measure so many decode steps, in processor time")
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    if options.interpreter:
        from vllm.triton_utils.dispatcher import register_kernels

        from vllm_dllm.cpu import fallbacks

        fallbacks.install = register_kernels  # vLLM's alone

    with tempfile.TemporaryDirectory() as path:
        make_checkpoint(path)
        llm = LLM(
            path,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            max_num_batched_tokens=64,  # the longer prompts come in chunks
            max_num_seqs=8,
            enforce_eager=True,
            kv_cache_memory_bytes=32 * 2**20,
        )

    def generate(prompts: list[list[int]], **sampling: object) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(detokenize=False, **sampling),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    worker = llm.llm_engine.model_executor.driver_worker.worker
    report: dict[str, object] = {"runner": type(worker.model_runner).__module__}
    if options.steps:
        sampling = {"temperature": 0, "ignore_eos": True}
        generate(PROMPTS[:1], max_tokens=20, **sampling)
        seconds = []
        for _ in range(5):
            start = time.process_time()  # on a busy machine wall time tells little
            generate(PROMPTS[:1], max_tokens=options.steps, **sampling)
            seconds.append(time.process_time() - start)
        report["ms_per_step"] = round(1000 * min(seconds) / options.steps, 3)
    else:
        report["tokens"] = {
            "greedy": generate(PROMPTS, temperature=0, max_tokens=24, ignore_eos=True),
            "top_k of one": generate(PROMPTS, temperature=0.7, top_k=1, min_p=0.1, max_tokens=24),
            "penalties and biases": generate(
                PROMPTS,
                temperature=0,
                max_tokens=24,
                ignore_eos=True,
                repetition_penalty=1.3,
                frequency_penalty=0.5,
                presence_penalty=0.2,
                logit_bias={7: 2.0, 9: -1.0},
                logprobs=3,
            ),
            "allowed tokens and minimum length": generate(
                PROMPTS,
                temperature=0,
                max_tokens=24,
                min_tokens=5,
                stop_token_ids=[3],
                allowed_token_ids=[3, 4, 5, 6],
            ),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
