"""I-DLM checkpoints, which call themselves SDAR: how they are told apart, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.transformers_utils.config import get_config

from tests.engine.models.test_model_configs import SDAR_8B, engine_config_of
from vllm_dllm.geometry import geometry_of
from vllm_dllm.models.draft_adapter import FILES, parts_of
from vllm_dllm.models.sdar_configs import IDLMConfig, SDARConfig, is_idlm

IDLM_8B = SDAR_8B | {"block_size": 3, "eos_token_id": 151645, "mask_token_id": 151669, "max_position_embeddings": 40960}
CAUSAL = IDLM_8B | {"use_regular_causal": True}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("yifanyu/I-DLM-8B", True),
        ("/models/I-DLM-32B/", True),
        ("/cache/models--yifanyu--I-DLM-8B/snapshots/0a1b2c", True),
        ("me/my-idlm-b3/checkpoint-500", True),
        ("/models/IDLM8B", True),
        ("/models/I_DLM-8B", True),
        ("JetLM/SDAR-8B-Chat-b32", False),
        ("I-DLM/SDAR-8B-Chat", False),
        ("me/SDAR-8B-from-i-dlm", False),
        ("me/idlms-8B", False),
        ("", False),
    ],
)
def test_a_checkpoint_is_known_by_its_name_unless_it_says_how_it_attends(name: str, expected: bool) -> None:
    assert is_idlm(SDAR_8B, name) == expected
    if expected:
        assert is_idlm(IDLM_8B, name)
    else:
        # SDAR has no blocks as short as I-DLM's runs of masks.
        with pytest.raises(ValueError, match=r"block_size=3 of .*use_regular_causal in config.json.*--config-format"):
            is_idlm(IDLM_8B, name)
    assert is_idlm(CAUSAL, name)
    assert not is_idlm(IDLM_8B | {"use_regular_causal": False}, name)


def test_blocks_have_a_seed_drafts_and_as_many_masks(write_config: Callable[..., str]) -> None:
    config = AutoConfig.from_pretrained(write_config(CAUSAL))
    assert type(config) is IDLMConfig
    assert (config.block_size, config.block_length, config.guessed_block_length) == (3, 7, None)
    # What is saved is read the same.
    assert AutoConfig.from_pretrained(write_config(config.to_dict())).block_length == 7
    assert AutoConfig.from_pretrained(write_config(CAUSAL | {"block_size": None})).block_length == 7
    assert AutoConfig.from_pretrained(write_config(CAUSAL | {"block_size": 2})).block_length == 5
    assert type(AutoConfig.from_pretrained(write_config(IDLM_8B | {"use_regular_causal": False}))) is SDARConfig
    with pytest.raises(ValueError, match="block_size=0 is not allowed: it counts the masks of a forward of I-DLM"):
        AutoConfig.from_pretrained(write_config(CAUSAL | {"block_size": 0}))


def test_the_name_of_a_folder(tmp_path: Path) -> None:
    for name, stored, expected in (("I-DLM-8B", IDLM_8B, IDLMConfig), ("SDAR-8B-Chat-b4", SDAR_8B, SDARConfig)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(stored))
        assert type(get_config(str(tmp_path / name), trust_remote_code=False)) is expected


def test_config_format(write_config: Callable[..., str]) -> None:
    """Where neither says it."""
    config = engine_config_of(write_config(IDLM_8B), config_format="i_dlm")
    geometry = geometry_of(config)
    assert (geometry.traits.family, geometry.block_length, geometry.canvas_length) == ("I-DLM", 7, 7)
    assert (geometry.masks_differ, geometry.max_drafts, geometry.options.verify) == (False, 0, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": 8}, "block_length=8 is not allowed: a forward of I-DLM models has 2N - 1 positions"),
        ({"block_length": 1}, "block_length=1 is not allowed: .*an odd number from 3 to 129"),
        ({"threshold": 0.9}, "threshold=0.9 is not allowed: I-DLM models decode with verify='isd' alone, which does"),
        ({"max_drafts": 4}, "max_drafts=4 is not allowed: I-DLM models decode with verify='isd' alone"),
        ({"verify": "freedave"}, "verify='freedave' is not allowed: I-DLM models decode with 'isd' alone"),
        ({"step_map": True}, "step_map=True is not allowed: I-DLM models decode with verify='isd' alone"),
        ({"drafts": 3, "verify": "spiffy"}, "verify='spiffy' is not allowed: I-DLM models decode with 'isd' alone"),
        ({"first_token": "denoised"}, "first_token='denoised' is not allowed: I-DLM models have one way"),
    ],
)
def test_engine_options_that_do_not_go_with_it_are_refused(
    options: dict[str, Any], message: str, write_config: Callable[..., str]
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config_of(write_config(CAUSAL), additional_config={"dllm": options})


def test_an_adapter_of_the_masks_is_named_by_its_place(write_config: Callable[..., str], tmp_path: Path) -> None:
    checkpoint, nowhere = write_config(CAUSAL), str(tmp_path / "nowhere")

    def resolved(**options: Any) -> bool | str | None:
        config = engine_config_of(checkpoint, additional_config={"dllm": options})
        return geometry_of(config).options.draft_adapter

    assert resolved() is False
    assert resolved(draft_adapter=False) is False
    with pytest.raises(
        ValueError, match="draft_adapter=True is not allowed: checkpoints of I-DLM models have no adapter"
    ):
        resolved(draft_adapter=True)
    missing = (
        f"draft_adapter={nowhere!r} is not allowed: {nowhere} has no adapter_config.json and no adapter_model.safe"
    )
    with pytest.raises(ValueError, match=missing):
        resolved(draft_adapter=nowhere)
    for file in FILES:
        (tmp_path / file).touch()
    assert resolved(draft_adapter=str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_a_head_of_keys_share_its_part_of_an_adapter(rank: int) -> None:
    """8 heads of 16 and 2 of keys on 4 ranks."""
    layer: Any = QKVParallelLinear.__new__(QKVParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.tp_rank, layer.num_kv_head_replicas = rank, 2
    layer.total_num_heads, layer.total_num_kv_heads, layer.head_size, layer.v_head_size = 8, 2, 16, 16
    layer.output_partition_sizes = [32, 16, 16]
    keys = rank // 2 * 16
    assert parts_of(layer, "qkv") == [("q", 128, 32 * rank, 32), ("k", 32, keys, 16), ("v", 32, keys, 16)]


def test_other_models_refuse_it_and_late_overrides_are_seen(write_config: Callable[..., str]) -> None:
    sdar = write_config(SDAR_8B)
    with pytest.raises(ValueError, match="verify='isd' is not allowed: SDAR models see what is behind a position"):
        engine_config_of(sdar, additional_config={"dllm": {"verify": "isd"}})
    # The configuration has its class by then.
    with pytest.raises(ValueError, match=r"use_regular_causal=True comes too late in --hf-overrides: .* i_dlm"):
        engine_config_of(sdar, hf_overrides={"use_regular_causal": True})
    idlm = write_config(CAUSAL)
    with pytest.raises(ValueError, match="use_regular_causal=False comes too late in --hf-overrides"):
        engine_config_of(idlm, hf_overrides={"use_regular_causal": False})
    for late in ({"block_size": 1}, {"block_length": 3}):
        with pytest.raises(ValueError, match=r"block_size=. and block_length=. contradict each other: .*engine option"):
            engine_config_of(idlm, hf_overrides=late)
