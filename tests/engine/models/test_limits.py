"""The default of max_num_seqs where request slots have memory set aside: bounded by the device, unlike the user's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from tests.paths import ROOT
from vllm_dllm.models import limits
from vllm_dllm.models.limits import limit_default_for_draft_logits
from vllm_dllm.patches.default_max_num_seqs import LARGEST_DEFAULT
from vllm_dllm.runtime.plan.scratch import scratch_pages_of

GiB = 1 << 30
SDAR_8B_B32 = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "block_size": 32,
    "mask_token_id": 511,
}
DRAFTS = {"additional_config": {"dllm": {"max_drafts": 7}}}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Take this machine for a GPU with so many GiB and vLLM's defaults on an H100."""

    def set_memory(gib: int) -> None:
        monkeypatch.setattr(current_platform, "get_device_total_memory", lambda *_: gib * GiB)
        defaults = {UsageContext.OPENAI_API_SERVER: 8192}, {UsageContext.OPENAI_API_SERVER: 1024}
        monkeypatch.setattr(EngineArgs, "get_batch_defaults", classmethod(lambda cls, world_size: defaults))

    return set_memory


@pytest.fixture
def sdar_8b(engine_config: Callable[..., VllmConfig], monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmConfig]:
    """The configuration of a server for SDAR-8B-Chat-b32."""
    create = EngineArgs.create_engine_config
    monkeypatch.setattr(
        EngineArgs, "create_engine_config", lambda self: create(self, usage_context=UsageContext.OPENAI_API_SERVER)
    )

    def resolve(**arguments: Any) -> VllmConfig:
        return engine_config(SDAR_8B_B32, "SDAR-8B-Chat-b32", **arguments)

    return resolve


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the log says of the default of max_num_seqs."""
    messages: list[str] = []

    def keep(message: str, *values: Any) -> None:
        if "by default" in message:
            messages.append(message % values)

    monkeypatch.setattr(limits.logger, "info", keep)
    return messages


# Layers, heads of K/V and block length. All have 128 numbers in a head.
SHAPES = {
    "SDAR-1.7B-Chat": (28, 8, 4),
    "SDAR-1.7B-Chat-b32": (28, 8, 32),
    "SDAR-8B-Chat": (36, 8, 4),
    "SDAR-8B-Chat-b32": (36, 8, 32),
    "SDAR-30B-A3B-Chat-b32": (48, 4, 32),
}
"""Models of the table in docs/gpu.md."""


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_memory_says_what_a_card_of_80_gib_gets(
    name: str, device: Any, engine_config: Callable[..., VllmConfig], sdar_8b: Any
) -> None:
    layers, heads, block_length = SHAPES[name]
    shape = {"num_hidden_layers": layers, "num_key_value_heads": heads, "block_size": block_length}
    device(80)
    config = engine_config({**SDAR_8B_B32, **shape}, name, **DRAFTS)
    requests, page_size = config.scheduler_config.max_num_seqs, config.cache_config.block_size
    scratch = scratch_pages_of(config, page_size) * page_size * layers * 2 * heads * 128 * 2
    row = f"| {name} | {page_size} | {requests} | {scratch / requests / 2**20:.1f} | {scratch / GiB:.1f} |"
    assert row in (ROOT / "docs" / "gpu.md").read_text(), row


def scratch_bytes(config: VllmConfig) -> int:
    page_size = config.cache_config.block_size
    return scratch_pages_of(config, page_size) * page_size * 36 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(("gib", "most"), [(80, 256), (24, 90)])
def test_scratch_pages_take_an_eighth_of_the_memory_at_most(
    gib: int, most: int, device: Any, sdar_8b: Any, said: list[str]
) -> None:
    device(gib)
    config = sdar_8b(**DRAFTS)
    memory = gib * GiB * config.cache_config.gpu_memory_utilization
    assert config.scheduler_config.max_num_seqs == min(most, int(memory / 8 / (7 * 4.5 * 2**20)))
    assert scratch_bytes(config) <= memory / 8
    assert f"max_num_seqs is {config.scheduler_config.max_num_seqs} by default instead of 1024" in said[0]
    assert "31.5 MiB" in said[0]


def test_no_more_requests_hold_scratch_pages_than_have_a_block_in_a_step(device: Any, sdar_8b: Any) -> None:
    device(1000)
    assert sdar_8b(**DRAFTS).scheduler_config.max_num_seqs == 8192 // 32
    assert sdar_8b(max_num_batched_tokens=1024, **DRAFTS).scheduler_config.max_num_seqs == 1024 // 32


@pytest.mark.parametrize("given", [1024, 128, 512])
def test_a_number_of_the_user_stays_the_default_among_them(
    given: int, device: Any, sdar_8b: Any, said: list[str]
) -> None:
    device(24)
    assert sdar_8b(max_num_seqs=given, **DRAFTS).scheduler_config.max_num_seqs == given
    assert not said


def test_an_engine_without_drafts_keeps_the_default(device: Any, sdar_8b: Any) -> None:
    device(24)
    assert sdar_8b().scheduler_config.max_num_seqs == 1024


def test_memory_that_the_user_gave_the_kv_cache_counts(device: Any, sdar_8b: Any) -> None:
    device(80)
    config = sdar_8b(kv_cache_memory_bytes=8 * GiB, **DRAFTS)
    assert scratch_bytes(config) <= GiB
    assert config.scheduler_config.max_num_seqs == 32
    assert sdar_8b(num_gpu_blocks_override=700, **DRAFTS).scheduler_config.max_num_seqs == 700 // 8 // 7


def test_logits_of_a_drafter_bound_the_default(device: Any, said: list[str]) -> None:
    model = str(ROOT / "checkpoints" / "tiny-qwen2")
    drafter = {"method": "dllm", "num_speculative_tokens": 16}
    device(1)
    # 1 GiB / 32 hold 2048 slots of 16 x 512 numbers of 2 bytes.
    config = EngineArgs(
        model=model, speculative_config=drafter, dtype="bfloat16", max_num_seqs=2000
    ).create_engine_config()
    assert config.scheduler_config.max_num_seqs == 2000
    assert f"at most {2**30 // 32 // (16 * 512 * 2)} by default" in said[0]
    assert getattr(config.model_config, LARGEST_DEFAULT) == 2048
    limit_default_for_draft_logits(config.model_config, 128, torch.float32)
    assert getattr(config.model_config, LARGEST_DEFAULT) == 128
