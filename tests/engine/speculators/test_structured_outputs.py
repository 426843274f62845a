"""Structured outputs of an autoregressive model with a diffusion drafter: vLLM's own, beside our drafts."""

import re
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.shared import shared_engine
from tests.paths import CHECKPOINTS

REGEX = r"First, [0-9]{1,2} \+ [0-9]{1,2} = [0-9]{1,2} (apples|pens)\.\n#### [0-9]{1,2}"
QUESTION: Any = [
    {"role": "user", "content": "Ada has 12 apples. Ben gives Ada 7 more. How many apples does Ada have now?"}
]
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "kv_cache_memory_bytes": 1 << 27,
    "enforce_eager": True,
    "dtype": "float32",
}


def engine(speculative_config: dict[str, Any] | None) -> LLM:
    target = str(CHECKPOINTS / "tiny-qwen2")
    return shared_engine(
        ("structured outputs", target, speculative_config is None),
        lambda: LLM(target, speculative_config=speculative_config, **OPTIONS),
    )


def test_answers_are_valid_and_those_without_the_drafter() -> None:
    drafter = {"method": "dllm", "model": str(CHECKPOINTS / "tiny-deer"), "num_speculative_tokens": 8}
    asked = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=64, structured_outputs=StructuredOutputsParams(regex=REGEX)
        )
        for seed, temperature in enumerate([0.0, 0.8, 1.2] * 4)
    ]
    drafted, alone = (
        [output.outputs[0] for output in llm.chat([QUESTION] * len(asked), asked, use_tqdm=False)]
        for llm in (engine(drafter), engine(None))
    )
    assert all(re.fullmatch(REGEX, answer.text) for answer in drafted)
    greedy = [(one.text, other.text) for one, other in zip(drafted, alone, strict=True)][::3]
    assert all(one == other for one, other in greedy)
