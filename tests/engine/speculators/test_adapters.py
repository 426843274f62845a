"""LoRA adapters of an autoregressive target with a diffusion drafter."""

import re
import sys
from pathlib import Path

from vllm.lora.request import LoRARequest

from tests.engine.harness import greedy, tokens_of
from tests.engine.speculators.engines import engine, plain_engine, target
from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

from adapters import random_adapter, write_adapter

LAYERS = re.compile(r"\.(q|k|v|o|gate|up|down)_proj$")


def test_each_request_has_its_adapter_or_none(tmp_path: Path) -> None:
    """With places for no more adapters than one, where a CPU takes rows without an adapter for rows with it."""
    adapter = random_adapter(target(), LAYERS, rank=4, seed=1, size=0.5)
    asked = LoRARequest("adapter", 1, str(write_adapter(adapter, tmp_path / "adapter", alpha=4)))
    llm = engine("causal", seed=0, enable_lora=True, max_loras=1, max_lora_rank=8)
    prompts = [{"prompt_token_ids": [5, 6, 7 + index]} for index in range(4)]

    def answers(choices: list[LoRARequest | None]) -> list[list[int]]:
        outputs = llm.generate(prompts, greedy(max_tokens=12), use_tqdm=False, lora_request=choices)
        return [tokens_of(output) for output in outputs]

    base = plain_engine()
    expected = [tokens_of(each) for each in base.generate(prompts, greedy(max_tokens=12), use_tqdm=False)]
    adapted = answers([asked] * 4)
    assert adapted != expected
    assert answers([None] * 4) == expected
    mixed = answers([asked, None, asked, None])
    assert mixed == [adapted[0], expected[1], adapted[2], expected[3]]
