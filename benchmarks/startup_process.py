"""One start of an engine: ``python startup_process.py CHECKPOINT``.

Says on standard output what has been done, a word per line, and goes on when a line comes in.
"""

import os
import sys
from enum import StrEnum

KV_CACHE_BYTES = 64 << 20
PROMPT = [20] * 8


class Stage(StrEnum):
    """What has been done, in this order."""

    IMPORTED = "import"
    """``from vllm import LLM``."""
    LOADED = "engine"
    """``LLM(...)``."""
    ANSWERED = "first token"
    """The first token of the first request, which for a diffusion model is that of its first block."""


def main(checkpoint: str) -> None:
    """Start an engine and ask it for one token."""
    # Libraries print what they like to standard output; the stages keep it for themselves.
    stages = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reached(stage: Stage) -> None:
        print(stage, file=stages)
        sys.stdin.readline()

    from vllm import LLM, SamplingParams

    reached(Stage.IMPORTED)
    llm = LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
    )
    reached(Stage.LOADED)
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    reached(Stage.ANSWERED)


if __name__ == "__main__":
    # Also in the processes that vLLM starts: they import this module.
    main(sys.argv[1])
