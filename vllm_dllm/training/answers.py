"""The teacher's answers that D2A alignment trains on: written with vLLM, and read."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from vllm_dllm.training.data import (
    Example,
    TrainingError,
    encode,
    encode_prompts,
    pair_of,
    parse_records,
    read_records,
    short_enough,
)

_PORTION = 1000


def _written(out: Path) -> list[dict[str, Any]]:
    """The records of ``out``, which loses a last line that a run was cut off in.

    Raises:
        TrainingError: another line is no record.
    """
    if not out.is_file():
        return []
    whole, end, last = out.read_bytes().rpartition(b"\n")
    records = [record for _, record in parse_records(out, whole)]
    try:
        records.append(json.loads(last))
    except ValueError:
        os.truncate(out, len(whole) + len(end))
    else:
        with out.open("ab") as file:
            file.write(b"\n")
    return records


@contextmanager
def model_runner_v2() -> Iterator[None]:
    """Serve any model with Model Runner V2, unless the environment chooses; the environment is put back at the end.

    vLLM's older runner, its default for autoregressive models on a CPU, dies of seeds there.
    """
    name = "VLLM_USE_V2_MODEL_RUNNER"
    is_chosen = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if not is_chosen:
            del os.environ[name]


def write_answers(
    model: str,
    questions: list[str],
    out: Path,
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    engine: dict[str, Any],
) -> str:
    """Let the target answer user messages, behind the answers that ``out`` has: a line about it.

    Raises:
        TrainingError: ``out`` has answers to other prompts, or a prompt is too long.
    """
    done = len(written := [record.get("prompt") for record in _written(out)])
    if written != questions[:done]:
        raise TrainingError(f"{out} has answers to other prompts: choose another --out or remove it")
    if done == len(questions):
        return f"{out} has all {done} answers already"
    with model_runner_v2() if temperature > 0 else nullcontext():
        from vllm import LLM, SamplingParams

        out.parent.mkdir(parents=True, exist_ok=True)
        llm = LLM(model, **{"seed": seed, **engine})
        longest = llm.model_config.max_model_len - 1
        for number, tokens in enumerate(encode_prompts(llm.get_tokenizer(), questions), 1):
            if len(tokens) > longest:
                raise TrainingError(
                    f"prompt {number} has {len(tokens)} tokens, and the target answers prompts of up to {longest}: "
                    "leave it out, or give --engine a larger max_model_len"
                )
        cut_off = 0
        for start in range(done, len(questions), _PORTION):
            asked = questions[start : start + _PORTION]
            params = [
                SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + start + i)
                for i in range(len(asked))
            ]
            outputs = llm.chat([[{"role": "user", "content": question}] for question in asked], params)
            with out.open("a", encoding="utf-8") as file:
                for question, output in zip(asked, outputs, strict=True):
                    answer = output.outputs[0]
                    cut_off += answer.finish_reason == "length"
                    record = {
                        "prompt": question,
                        "response": answer.text,
                        "prompt_token_ids": output.prompt_token_ids,
                        "response_token_ids": list(answer.token_ids),
                    }
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return f"{out}: {len(questions)} answers, {cut_off} of them cut off at {max_tokens} tokens"


def read_answers(paths: list[Path], tokenizer: Any, end: str, max_length: int, vocab_size: int) -> list[Example]:
    """Teacher answers of JSON lines files.

    A line has ``prompt_token_ids`` and ``response_token_ids``, as :func:`write_answers` writes them, which are taken as
    they are; or ``prompt`` and ``response``, which are rendered in the chat template and tokenized; ``end`` follows.

    Raises:
        TrainingError: a file or a line cannot be used; the message says which and why.
    """
    tokenized: list[tuple[list[int], list[int]]] = []
    pairs: list[tuple[str, str]] = []
    for place, record in (record for path in paths for record in read_records(path)):
        if "response_token_ids" not in record:
            pairs.append(pair_of(place, record))
            continue
        for key in ("prompt_token_ids", "response_token_ids"):
            numbers = record.get(key)
            if not isinstance(numbers, list) or not numbers or any(type(number) is not int for number in numbers):
                raise TrainingError(f'{place}: "{key}" must be a list of token ids that is not empty')
            if not all(0 <= number < vocab_size for number in numbers):
                raise TrainingError(f'{place}: "{key}" has ids outside of the drafter\'s {vocab_size} rows')
        tokenized.append((record["prompt_token_ids"], record["response_token_ids"]))
    examples = short_enough(tokenized, max_length) if tokenized else []
    return examples + (encode(tokenizer, pairs, end, max_length) if pairs else [])
