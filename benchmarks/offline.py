"""What benchmarks that compare answers of engines in one process share: engine, answers, and the end of the tables."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheet import Sheet, Wanted, publish, wanted_sheet

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput


def start(checkpoint: Path, **more: Any) -> "LLM":
    """An engine for a tiny model; ``more`` replaces its options.

    An engine that ends takes the process groups of others in its process along, so end all but the last one first.
    """
    from vllm import LLM

    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 16384,
        "kv_cache_memory_bytes": 1 << 28,
        "block_size": 32,
        "enforce_eager": True,
        "seed": 0,
    }
    return LLM(str(checkpoint), **{**options, **more})


def answer(
    llm: "LLM",
    questions: Sequence[str],
    *,
    max_tokens: int = 48,
    options: dict[str, Any] | None = None,
    adapters: list[Any] | None = None,
) -> tuple[list["CompletionOutput"], float]:
    """Greedy answers to all questions together, and the seconds of processor time that they took.

    Args:
        options: ``extra_args`` of each request.
        adapters: of each question, its LoRA request or None.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=options)
    chats: Any = [[{"role": "user", "content": question}] for question in questions]
    began = time.process_time()
    outputs = llm.chat(chats, params, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0] for output in outputs], time.process_time() - began


def tokens(answers: Sequence["CompletionOutput"]) -> list[list[int]]:
    return [list(each.token_ids) for each in answers]


def differing(some: Sequence[Any], others: Sequence[Any]) -> int:
    """How many of ``some`` are not those at the same place of ``others``, as far as the shorter one goes."""
    return sum(one != other for one, other in zip(some, others, strict=False))


def none_differs(what: str, number: int) -> Wanted:
    """The target that no answer differs from ``what``."""
    return f"answers that differ from {what}", "0", str(number), not number


def finish(
    console: Any,
    environment: Any,
    target: Wanted,
    table: Sheet,
    rows: list[Any],
    out: Path,
    docs: Path | None,
    file: str,
) -> None:
    """Print and write the target and the table of the ``rows``, dataclasses, for the benchmark ``file``."""
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    publish(console, [wanted_sheet([target]), table], result, out, docs, file)
