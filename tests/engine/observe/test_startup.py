"""Lines that an engine writes when it starts."""

import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm import patches
from vllm_dllm.methods import POLICY_NAMES
from vllm_dllm.models.configs import DreamConfig, LLaDA2MoeConfig, LLaDAConfig, SDARConfig
from vllm_dllm.observe.startup import _patches, _policy, drafter_facts, format_line
from vllm_dllm.options.drafter import DrafterOptions
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.schema import DecodingOptions, parse_engine_options
from vllm_dllm.traits import FamilyTraits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (0, "0"),
        (0.9, "0.9"),
        ("SDAR", "SDAR"),
        ("Fast-dLLM v2", '"Fast-dLLM v2"'),
        ('"quoted" = x', r'"\"quoted\" = x"'),
        ("", '""'),
        (("a", "b"), "a,b"),
        ((), "none"),
    ],
)
def test_values_are_written_so_that_a_shell_could_split_them(value: Any, text: str) -> None:
    line = format_line("subject", {"key": value, "next": 1})
    assert line == f"vllm-dllm subject: key={text} next=1"
    assert len(shlex.split(line)) == 4


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_every_policy_goes_by_is_told(policy: str) -> None:
    engine = parse_engine_options({"dllm": {"policy": policy} | ({"eager": 3} if policy == "multi_block" else {})})
    told = _policy(engine, resolve(DecodingOptions(), engine, SDARConfig.traits, block_length=8))
    assert told.pop("policy") == policy
    assert told


@pytest.mark.parametrize(
    ("traits", "options", "told"),
    [
        (SDARConfig.traits, {}, {"policy": "threshold", "threshold": 0.9, "tokens_per_step": 1}),
        (LLaDA2MoeConfig.traits, {}, {"policy": "threshold", "threshold": 0.95, "tokens_per_step": 1}),
        (SDARConfig.traits, {"policy": "static", "denoising_steps": 3}, {"policy": "static", "denoising_steps": 3}),
        (LLaDAConfig.traits, {"policy": "static", "steps": 64}, {"policy": "static", "steps": 64}),
        (SDARConfig.traits, {"policy": "entropy"}, {"policy": "entropy", "entropy_bound": 0.35}),
        # Dream's entropy goes by timesteps, and with a bound it is the other one.
        (DreamConfig.traits, {"policy": "entropy", "denoising_steps": 4}, {"policy": "entropy", "num_steps": 4}),
        (DreamConfig.traits, {"policy": "entropy", "entropy_bound": 0.5}, {"policy": "entropy", "entropy_bound": 0.5}),
        (
            SDARConfig.traits,
            {"policy": "localleap"},
            {"policy": "localleap", "threshold": 0.9, "relaxed_threshold": 0.75, "radius": 4, "tokens_per_step": 1},
        ),
        (
            LLaDA2MoeConfig.traits,
            {"edit_threshold": 0.9},
            {"policy": "threshold", "threshold": 0.95, "tokens_per_step": 1, "edit_threshold": 0.9},
        ),
        (
            DreamConfig.traits,
            {"policy": "maskgit_plus", "alg_temp": 0.2, "denoising_steps": 4},
            {"policy": "maskgit_plus", "num_steps": 4, "alg_temp": 0.2},
        ),
        (
            LLaDAConfig.traits,
            {"cfg_scale": 1.5},
            {"policy": "threshold", "threshold": 0.9, "tokens_per_step": 1, "cfg_scale": 1.5},
        ),
        (
            SDARConfig.traits,
            {"verify": "fef", "window": 4, "max_drafts": 7},
            {"window": 4, "resample_steps": 2, "remask": 0.5},
        ),
    ],
)
def test_a_policy_is_told_with_what_it_goes_by(
    traits: FamilyTraits, options: dict[str, Any], told: dict[str, Any]
) -> None:
    engine = parse_engine_options({"dllm": options})
    assert _policy(engine, resolve(DecodingOptions(), engine, traits, block_length=8)) == told


def test_patches_are_told_by_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "apply_all", lambda: patches.PATCHES[1:])
    assert _patches() == {"applied": patches.PATCHES[1:], "in_vllm": patches.PATCHES[:1]}
    monkeypatch.setenv(patches.DISABLE, "1")
    assert _patches() == {"applied": (), "in_vllm": "not looked for"}


@pytest.mark.parametrize(
    ("ranks", "of_drafter", "told"), [(1, 1, "one"), (2, 2, "sharded"), (2, 1, "replicated")], ids=str
)
def test_a_drafter_is_told_with_how_the_ranks_share_it(ranks: int, of_drafter: int, told: str) -> None:
    target = SimpleNamespace(model="target", architecture="Qwen2ForCausalLM", max_model_len=64)
    hf_config = SimpleNamespace(traits=SDARConfig.traits, block_length=8)
    draft_model = SimpleNamespace(model="d", architecture="SDARForCausalLM", max_model_len=32, hf_config=hf_config)
    config = SimpleNamespace(
        model_config=target,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(
            max_num_scheduled_tokens=None, max_num_batched_tokens=100, max_num_seqs=4, async_scheduling=False
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, data_parallel_index=1),
        speculative_config=SimpleNamespace(
            draft_model_config=draft_model,
            draft_tensor_parallel_size=of_drafter,
            num_speculative_tokens=5,
            draft_sample_method="greedy",
        ),
    )
    facts = drafter_facts(config, DrafterOptions(adaptive=True, missing_ids=(1, 2)))
    assert facts["drafter"] == {
        "model": "d",
        "family": "SDAR",
        "architecture": "SDARForCausalLM",
        "attention": "block-causal",
        "block_length": 8,
        "drafts": 5,
        "sampling": "greedy",
        "temperature_factor": 1.0,
        "draft_cache": "keep",
        "adaptive": True,
        "draft_length": "fixed",
        "max_model_len": 32,
        "tokens_not_shared": 2,
        "ranks": told,
    }
    assert facts["batch"]["rows_per_request"] == 6
    assert (facts["engine"]["tensor_parallel"], facts["engine"]["data_parallel_index"]) == (ranks, 1)
