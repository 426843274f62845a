"""Engines in this process, and what they make of requests, so many at a time."""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from step_skipping_settings import Setting
from systems import KV_CACHE_BYTES, Pass, Request, serve

if TYPE_CHECKING:
    from vllm import LLM


@contextmanager
def engine(
    checkpoint: Path,
    dllm: dict[str, Any],
    *,
    dtype: str,
    eager: bool,
    max_num_seqs: int,
    rows: int | None = None,
) -> "Iterator[LLM]":
    """An engine in this process.

    Args:
        rows: of a step. Default: room for all requests with all their drafts.
    """
    from vllm import LLM

    if rows is None:
        block_length = json.loads((checkpoint / "config.json").read_text())["block_size"]
        rows = max(max_num_seqs * (2 + dllm["max_drafts"]) * block_length, 2048)
    llm = LLM(
        str(checkpoint),
        dtype=dtype,
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rows,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        additional_config={"dllm": dllm},
        use_tqdm_on_load=False,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def decode(
    llm: "LLM", setting: Setting, requests: Sequence[Request], stop_token_ids: list[int], concurrency: int
) -> Pass:
    """All requests greedily under a setting. None finds what an earlier run left in the prefix cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm.reset_prefix_cache()
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=not stop_token_ids,
            extra_args=setting.extra_args(),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in requests
    ]
    return serve(llm, [request.prompt for request in requests], params, min(concurrency, len(requests)))
