import contextlib
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.vllm import OptimizationLevel

from vllm_dllm.geometry import geometry_of
from vllm_dllm.models import configs, fit, hook
from vllm_dllm.models.configs import FastDLLMQwenConfig
from vllm_dllm.plugin import FAMILIES
from vllm_dllm.runtime import scheduling
from vllm_dllm.runtime.scheduling import full  # noqa: F401, which derives from what a test below replaces

EngineConfig = Callable[..., VllmConfig]

FAST_DLLM_V2 = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen"}


def dllm(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": options}}


@pytest.mark.parametrize(
    ("arguments", "config", "name", "block_length"),
    [
        pytest.param({}, {}, "SDAR-8B-Chat", 4, id="the family's"),
        pytest.param({}, {}, "SDAR-8B-Chat-b32", 32, id="the name's over the family's"),
        pytest.param({}, {"block_size": 8}, "SDAR-8B-Chat-b32", 8, id="config.json's over the name's"),
        pytest.param(
            {"hf_overrides": {"block_length": 64}},
            {"block_size": 8},
            "SDAR",
            64,
            id="override over config.json",
        ),
        pytest.param(
            {"diffusion_config": {"canvas_length": 16}, "hf_overrides": {"block_length": 64}},
            {"block_size": 8},
            "SDAR-b32",
            16,
            id="--diffusion-config over overrides",
        ),
        pytest.param(
            {"diffusion_config": {"canvas_length": 16}, **dllm(block_length=2)},
            {"block_size": 8},
            "SDAR-b32",
            2,
            id="the plugin's option over everything",
        ),
    ],
)
def test_block_length_comes_from_the_first_that_gives_one(
    arguments: dict[str, Any],
    config: dict[str, Any],
    name: str,
    block_length: int,
    engine_config: EngineConfig,
) -> None:
    resolved = engine_config(config, name, **arguments)
    assert resolved.model_config.hf_config.block_length == block_length
    assert geometry_of(resolved).options.block_length == block_length
    assert resolved.diffusion_config.canvas_length == 2 * block_length


@pytest.mark.parametrize(
    ("arguments", "config", "name", "source"),
    [
        ({}, {}, "SDAR-b32-AWQ", r"block_length=32, from the name \S*/SDAR-b32-AWQ: config.json gives none"),
        ({}, {}, "SDAR", "block_length=4, from the default of SDAR models: config.json gives none"),
        ({}, {"block_size": 8}, "SDAR-b32", None),
        ({"hf_overrides": {"block_size": 8}}, {}, "SDAR-b32", None),
        (dllm(block_length=32), {}, "SDAR-b32", None),
    ],
)
def test_the_log_says_once_where_a_block_length_is_from_that_nobody_gives(
    arguments: dict[str, Any],
    config: dict[str, Any],
    name: str,
    source: str | None,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(hook.logger, "info", lambda message, *values: said.append(message % values))
    engine_config(config, name, **arguments)
    found = [message for message in said if ", from " in message]
    assert len(found) == (source is not None)
    assert source is None or re.fullmatch(source, found[0])


def test_vllm_takes_the_model_for_a_diffusion_model_with_non_causal_attention(
    engine_config: EngineConfig,
) -> None:
    resolved = engine_config()
    assert resolved.model_config.is_diffusion
    assert resolved.use_v2_model_runner
    assert resolved.attention_config.use_non_causal


def test_shifted_families_get_one_block_of_rows(engine_config: EngineConfig) -> None:
    resolved = engine_config(FAST_DLLM_V2)
    assert isinstance(resolved.model_config.hf_config, FastDLLMQwenConfig)
    assert resolved.diffusion_config.canvas_length == 32
    assert geometry_of(resolved).options.sub_block_length == 8


@pytest.mark.parametrize(
    ("options", "denoising_steps"),
    [({}, 3), ({"denoising_steps": 2}, 2), ({"tokens_per_step": 2}, None)],
)
def test_max_denoising_steps_is_the_steps_per_block_unless_our_options_give_a_schedule(
    options: dict[str, Any], denoising_steps: int | None, engine_config: EngineConfig
) -> None:
    resolved = engine_config(diffusion_config={"max_denoising_steps": 3}, **dllm(**options))
    assert geometry_of(resolved).options.denoising_steps == denoising_steps
    assert resolved.model_config.hf_config.block_length == 4


def test_max_denoising_steps_is_left_out_where_our_options_count_the_steps_of_an_answer(
    engine_config: EngineConfig,
) -> None:
    resolved = engine_config(TINY_LLADA, diffusion_config={"max_denoising_steps": 3}, **dllm(steps=64))
    options = geometry_of(resolved).options
    assert (options.steps, options.denoising_steps) == (64, None)


@pytest.mark.parametrize(("level", "compiles"), [(0, False), (1, True)])
def test_a_gpu_compiles_steps_unless_vllm_is_to_compile_nothing(
    level: int, compiles: bool, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = engine_config()
    resolved.model_config.enforce_eager, resolved.additional_config = False, {}
    resolved.optimization_level, resolved.compilation_config.mode = OptimizationLevel(level), None
    monkeypatch.setattr(hook, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert hook._resolve(resolved, resolved.model_config.hf_config).compile_steps is compiles


def test_options_keep_their_neighbours_and_the_users_dict_stays_as_it_was(
    engine_config: EngineConfig,
) -> None:
    mine = {"dllm": {"threshold": 0.8}, "other": 1}
    resolved = engine_config(additional_config=mine)
    assert mine == {"dllm": {"threshold": 0.8}, "other": 1}
    assert resolved.additional_config["other"] == 1
    assert geometry_of(resolved).options.threshold == 0.8


def test_mask_token_can_be_overridden(engine_config: EngineConfig) -> None:
    resolved = engine_config(hf_overrides={"mask_token_id": 500})
    assert resolved.model_config.hf_config.mask_token_id == 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            dllm(treshold=0.9),
            r"unknown engine option 'treshold' \(did you mean threshold\?\); allowed: policy, .*threshold",
            id="unknown option",
        ),
        pytest.param(
            dllm(draft_graph="nowhere.json"),
            "draft_graph='nowhere.json' is not allowed: this engine has no room for drafts",
            id="graph without drafts",
        ),
        pytest.param(dllm(threshold=2), "engine option threshold=2 is not allowed", id="bad value"),
        pytest.param(dllm(block_length=0), "engine option block_length=0 is not allowed", id="no length"),
        pytest.param(
            {"hf_overrides": {"block_length": -4}},
            "engine option block_length=-4 is not allowed",
            id="negative",
        ),
        pytest.param(
            dllm(block_length=32, sub_block_length=5),
            "sub_block_length=5 does not divide block_length=32",
            id="sub-blocks",
        ),
        pytest.param(
            {"hf_overrides": {"mask_token_id": 512}}, "mask_token_id=512 is not a token .* has 512", id="mask"
        ),
        pytest.param(
            {"hf_overrides": {"mask_token_id": True}},
            "mask_token_id=True is not a token .* N from 0 to 511",
            id="mask that is none",
        ),
        pytest.param(
            {"hf_overrides": {"block_size": None}},
            r"block_length=None is not allowed \(block_size .*whole number of at least 1",
            id="no length in an override",
        ),
        pytest.param(
            {"hf_overrides": {"block_size": True}},
            r"block_length=True is not allowed \(block_size .*whole number of at least 1",
            id="length that is none",
        ),
        pytest.param({"attention_backend": "FLASHINFER"}, "--attention-backend FLASHINFER", id="attention"),
        pytest.param(
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            "does not know the rows of a block; derive it from vllm_dllm.runtime.scheduling.DllmScheduler",
            id="scheduler",
        ),
        pytest.param(
            {"block_size": 48, **dllm(block_length=32)},
            "--block-size 48 .* multiple .* block_length=32",
            id="page",
        ),
        pytest.param(
            {"prefix_match_unit": 16, **dllm(block_length=32)},
            "--prefix-match-unit 16 is not a multiple .* block_length=32",
            id="prefix unit",
        ),
        pytest.param(
            {"max_num_batched_tokens": 40, "max_num_seqs": 2, **dllm(block_length=32)},
            r"max_num_batched_tokens=40 must be more than the 64 rows .* \(block_length=32\)",
            id="batch",
        ),
        pytest.param(
            {"max_num_batched_tokens": 40, "max_num_scheduled_tokens": 400, "max_num_seqs": 2, **dllm(block_length=32)},
            r"max_num_batched_tokens=40 must be more than the 64 rows .* \(block_length=32\)",
            id="batch, and more scheduled",
        ),
        pytest.param(
            {"max_num_batched_tokens": 400, "max_num_scheduled_tokens": 40, "max_num_seqs": 2, **dllm(block_length=32)},
            r"max_num_scheduled_tokens=40 must be more than the 64 rows .* \(block_length=32\)",
            id="batch, and less scheduled",
        ),
        pytest.param(
            {"max_num_batched_tokens": 100, "max_num_seqs": 2, **dllm(block_length=32, max_drafts=3)},
            r"max_num_batched_tokens=100 must be more than the 128 rows .* \(block_length=32, max_drafts=3\)",
            id="batch with drafts",
        ),
        pytest.param(
            {"long_prefill_token_threshold": 16, **dllm(block_length=32)},
            r"long_prefill_token_threshold=16 is less than the 64 rows .* \(block_length=32\)",
            id="prefill chunk",
        ),
        pytest.param(
            {"max_num_batched_tokens": 8192, **dllm(block_length=2048)},
            "block_length=2048 exceeds the 1024 positions",
            id="positions",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_start_with_its_name_and_value(
    arguments: dict[str, Any], message: str, engine_config: EngineConfig
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(**arguments)


@pytest.mark.parametrize(
    ("section", "attribute", "value", "flag"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("parallel_config", "decode_context_parallel_size", 2, "--decode-context-parallel-size"),
        ("parallel_config", "prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("parallel_config", "enable_dbo", True, "--enable-dbo"),
        ("parallel_config", "ubatch_size", 2, "--ubatch-size"),
        (None, "speculative_config", object(), "--speculative-config"),
        (
            None,
            "kv_transfer_config",
            KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
            "--kv-transfer-config",
        ),
        ("cache_config", "kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
        ("model_config", "runner_type", "pooling", "--runner pooling"),
        ("model_config", "enable_prompt_embeds", True, "--enable-prompt-embeds"),
        ("structured_outputs_config", "backend", "outlines", "--structured-outputs-config"),
        ("aux_output_config", "enable_return_routed_experts", True, "--enable-return-routed-experts"),
        ("model_config", "use_fp64_gumbel", True, "--use-fp64-gumbel"),
        ("parallel_config", "enable_batch_sharded_sampling", True, "--enable-batch-sharded-sampling"),
    ],
)
def test_features_that_do_not_work_yet_are_refused_by_their_flag(
    section: str | None, attribute: str, value: Any, flag: str, engine_config: EngineConfig
) -> None:
    resolved = engine_config()
    owner = getattr(resolved, section) if section else resolved
    object.__setattr__(owner, attribute, value)
    with pytest.raises(ValueError, match=rf"SDAR models do not work with .*\({flag}\)"):
        hook.BlockDiffusionModelConfig.verify_and_update_config(resolved)


def test_no_more_log_probabilities_are_allowed_than_there_are_tokens(engine_config: EngineConfig) -> None:
    vocab_size = engine_config().model_config.get_vocab_size()
    for asked, allowed in ((-1, -1), (20, 20), (vocab_size + 1, vocab_size)):
        assert engine_config(max_logprobs=asked).model_config.max_logprobs == allowed


@pytest.mark.parametrize(
    "variable", ["VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_RAISE_ON_LOGIT_NANS", "VLLM_USE_RUST_FRONTEND"]
)
def test_features_that_do_not_work_yet_are_refused_by_their_variable(
    variable: str, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = engine_config()
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"SDAR models do not work with .*{variable}=1"):
        hook.BlockDiffusionModelConfig.verify_and_update_config(resolved)


@pytest.mark.parametrize(("has_experts", "on_cpu"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("arguments", "parallel", "message"),
    [
        ({}, {"data_parallel_size": 2}, r"experts .*\(--data-parallel-size\) on a CPU"),
        ({}, {"enable_expert_parallel": True}, r"expert parallelism \(--enable-expert-parallel\) on a CPU"),
        ({"enable_lora": True}, {}, r"\(--enable-lora\) of a mixture of experts on a CPU"),
    ],
    ids=["data parallelism", "expert parallelism", "adapters"],
)
def test_what_experts_cannot_do_on_a_cpu_is_refused_there(
    arguments: dict[str, Any],
    parallel: dict[str, Any],
    message: str,
    has_experts: bool,
    on_cpu: bool,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved = engine_config(**arguments)
    monkeypatch.setattr(type(resolved.model_config), "is_moe", has_experts)
    monkeypatch.setattr(hook, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    for name, value in parallel.items():
        setattr(resolved.parallel_config, name, value)
    refusal = pytest.raises(ValueError, match=message)
    with refusal if has_experts and on_cpu else contextlib.nullcontext():
        hook._refuse_what_does_not_work_yet(resolved, "SDAR")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(("given", "taken"), [("auto", "fp8"), ("fp8_e5m2", "fp8_e5m2")])
def test_the_backend_is_one_for_the_cache_that_the_checkpoint_asks_for(
    given: Any, taken: str, key: str, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself reads it from the checkpoint when it builds the model."""
    seen: list[str] = []
    choose = fit.choose_backend
    monkeypatch.setattr(fit, "choose_backend", lambda *args, **more: (seen.append(args[2]), choose(*args, **more))[1])
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**eight_bits, "strategy": "channel"}, "input_activations": None}
    quantized = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": {**eight_bits, "strategy": "tensor"},
    }
    engine_config({key: quantized}, kv_cache_dtype=given)
    assert seen == [taken]


def test_an_architecture_on_a_foreign_configuration_is_refused(engine_config: EngineConfig) -> None:
    with pytest.raises(ValueError, match=r"SDARForCausalLM cannot run .* model_type='qwen3'"):
        engine_config({"model_type": "qwen3"})


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DreamModel"])
@pytest.mark.parametrize("key", ["config", "hf_overrides"])
def test_a_diffusion_configuration_under_a_foreign_architecture_is_refused_at_start(
    key: str, architecture: str, engine_config: EngineConfig
) -> None:
    said = rf"architectures=\['{architecture}'\] of config.json or --hf-overrides is .* allowed: SDARForCausalLM\b"
    with pytest.raises(ValueError, match=said):
        engine_config(**{key: {"architectures": [architecture]}})


@pytest.mark.parametrize("key", ["config", "hf_overrides"])
def test_what_the_backbone_cannot_do_is_refused_wherever_it_is_asked_for(key: str, engine_config: EngineConfig) -> None:
    with pytest.raises(
        ValueError, match="use_sliding_window=True is not supported for SDAR models; allowed: False, None"
    ):
        engine_config(**{key: {"use_sliding_window": True}})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_may_have_its_own_architectures_alone(architecture: str) -> None:
    config = getattr(configs, FAMILIES[architecture])(architectures=[architecture])
    assert config.canvas_length >= config.block_length
    config.architectures = ["LlamaForCausalLM", architecture]
    with pytest.raises(ValueError, match=rf"for {config.traits.family} models; allowed: (\w+, )*{architecture}\b"):
        _ = config.canvas_length


def test_a_model_class_that_knows_no_blocks_is_refused_at_the_latest_by_a_request(engine_config: EngineConfig) -> None:
    """Transformers' backend has one for every architecture."""
    config = engine_config()
    del config.model_config.hf_config.geometry
    said = r"is not served as a diffusion model: architectures=\['SDARForCausalLM'\] of its config.json"
    with pytest.raises(ValueError, match=said):
        geometry_of(config)
    with pytest.raises(ValueError, match=said):
        config.model_config.hf_config.diffusion_validate_request([1], SamplingParams(), resumable=False)


@pytest.mark.parametrize(
    ("block_length", "page"),
    [(4, 128), (32, 128), (48, 96), (256, 256)],
)
def test_pages_hold_whole_blocks_on_cpu(block_length: int, page: int, engine_config: EngineConfig) -> None:
    assert engine_config(**dllm(block_length=block_length)).cache_config.block_size == page


@pytest.mark.parametrize(("block_length", "page"), [(32, 32), (24, 48), (64, 64)])
def test_pages_hold_whole_blocks_on_other_devices(
    block_length: int, page: int, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    resolved = engine_config(**dllm(block_length=block_length))
    assert resolved.cache_config.block_size == page
    assert resolved.cache_config.user_specified_block_size, "or the attention backend's choice replaces it"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verify": "freedave", "block_length": 4}, True),
        ({"verify": "freedave", "block_length": 4, "eager": False}, False),
        ({"verify": "freedave", "block_length": 4, "eager": True}, False),
        ({"verify": "freedave", "block_length": 4, "drafts": 3}, False),
        ({"verify": "freedave", "block_length": 16}, False),
        ({"block_length": 4}, False),
    ],
)
def test_freedave_in_short_blocks_is_told_of_eager(
    options: dict[str, Any], said: bool, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(fit.logger, "info", lambda message, *values: messages.append(message % values))
    engine_config(**dllm(**options))
    assert any("Blocks of 4 have room for 2 of 7 drafts" in message for message in messages) == said


@pytest.mark.parametrize(("block_length", "number"), [(4, 56), (32, 32), (4096, 1)])
def test_cuda_graphs_are_captured_for_whole_blocks(block_length: int, number: int) -> None:
    sizes = fit.capture_sizes(block_length, 8192)
    assert len(sizes) == number
    assert all(size % block_length == 0 for size in sizes) or sizes == [8192]
    assert all(8 * (after - size) <= max(size, 8 * block_length) for size, after in itertools.pairwise(sizes))
    # A step has no more rows than that.
    assert max(fit.capture_sizes(block_length, 256)) <= 256


@pytest.mark.parametrize("given", [{}, {"cudagraph_capture_sizes": [64]}, {"max_cudagraph_capture_size": 64}])
def test_capture_sizes_of_the_user_stay(
    given: dict[str, Any], engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = engine_config()
    for module in (hook, fit):
        monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    compilation = resolved.compilation_config
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        setattr(compilation, name, given.get(name))
    hook.BlockDiffusionModelConfig.verify_and_update_config(resolved)
    expected = given.get("cudagraph_capture_sizes")
    if not given:
        geometry = resolved.model_config.hf_config.geometry
        expected = fit.capture_sizes(geometry.block_length, geometry.step_rows)
    assert compilation.cudagraph_capture_sizes == expected


def test_pages_of_pangu_may_end_in_the_midst_of_a_block_and_its_context_stays(engine_config: EngineConfig) -> None:
    pangu = {"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded"}
    config = engine_config(
        pangu, config_format="pangu_diffusion", block_size=32, max_model_len=1000, **dllm(block_length=48)
    )
    assert (config.cache_config.block_size, config.model_config.max_model_len) == (32, 1000)
    # The last block may begin on the last position.
    config = engine_config(pangu, config_format="pangu_diffusion", max_model_len=1024)
    assert config.model_config.max_model_len == 1024
    assert config.model_config.hf_config.max_position_embeddings == 1024 + 31


def test_a_page_size_of_whole_blocks_is_the_users_choice(engine_config: EngineConfig) -> None:
    assert engine_config(block_size=64, **dllm(block_length=32)).cache_config.block_size == 64


@pytest.mark.parametrize(
    ("config", "arguments", "max_model_len"),
    [
        pytest.param({}, {}, 1008, id="derived"),
        pytest.param({}, {"max_model_len": -1}, 1008, id="auto"),
        pytest.param({}, {"max_model_len": 1020}, 1008, id="given"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, 2016, id="linear scaling"),
        pytest.param({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, 1008, id="dynamic scaling"),
        pytest.param(
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300},
                "max_position_embeddings": 1200,
            },
            {},
            1200,
            id="yarn",
        ),
    ],
)
def test_context_is_lowered_where_its_last_block_would_leave_the_rotary_table(
    config: dict[str, Any],
    arguments: dict[str, Any],
    max_model_len: int,
    engine_config: EngineConfig,
    hook_log: pytest.LogCaptureFixture,
) -> None:
    resolved = engine_config(config, **arguments, **dllm(block_length=48))
    assert resolved.model_config.max_model_len == max_model_len
    lowered = max_model_len % 1200 != 0
    assert (f"to {max_model_len}: whole blocks of 48" in hook_log.text) == lowered


@pytest.mark.parametrize(
    ("options", "warned"), [({"block_length": 8}, True), ({"block_length": 4}, False), ({}, False)]
)
def test_a_block_length_other_than_the_checkpoints_is_a_warning(
    options: dict[str, Any], warned: bool, engine_config: EngineConfig, hook_log: pytest.LogCaptureFixture
) -> None:
    engine_config({"block_size": 4}, **dllm(**options))
    assert ("block_length=8 is not the checkpoint's, which is 4" in hook_log.text) == warned


def test_a_models_options_beside_their_key_stop_the_start(engine_config: EngineConfig) -> None:
    for misplaced in ({"threshold": 0.5}, {"dlm": {"threshold": 0.5}}):
        with pytest.raises(ValueError, match=r"is not read: engine options of vllm-dllm belong under the key"):
            engine_config(additional_config=misplaced)


def test_context_is_kept_where_its_last_block_fits(
    engine_config: EngineConfig, hook_log: pytest.LogCaptureFixture
) -> None:
    assert engine_config(max_model_len=1001, **dllm(block_length=48)).model_config.max_model_len == 1001
    assert "Lowering" not in hook_log.text


@pytest.mark.parametrize("max_num_seqs", [64, 65])
def test_log_says_how_many_requests_denoise_in_one_step_when_not_all_do(
    max_num_seqs: int, engine_config: EngineConfig, hook_log: pytest.LogCaptureFixture
) -> None:
    engine_config(max_num_batched_tokens=2048, max_num_seqs=max_num_seqs, **dllm(block_length=32))
    assert ("Up to 64 of 65 requests denoise in one step" in hook_log.text) == (max_num_seqs == 65)


class Recorder:
    """Stands for a scheduler class: keeps what it was created with."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs


class AsyncRecorder(Recorder):
    pass


@pytest.mark.parametrize(("asynchronous", "expected"), [(False, Recorder), (True, AsyncRecorder)])
def test_the_scheduler_follows_vllms_last_word_on_asynchronous_scheduling(
    asynchronous: bool,
    expected: type[Recorder],
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduling, "DllmScheduler", Recorder)
    monkeypatch.setattr(scheduling, "DllmAsyncScheduler", AsyncRecorder)
    resolved = engine_config()
    resolved.scheduler_config.async_scheduling = asynchronous
    created = resolved.scheduler_config.get_scheduler_cls()(vllm_config=resolved, log_stats=True)
    assert type(created) is expected
    assert created.kwargs == {"vllm_config": resolved, "log_stats": True}


@pytest.mark.parametrize(("level", "collected"), [("none", "summary"), ("detailed", "detailed")])
def test_the_scheduler_collects_what_requests_cost(
    level: str, collected: str, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "DllmScheduler", Recorder)
    resolved = engine_config()
    resolved.observability_config.per_request_spec_decode_metrics = level
    created = hook.create_scheduler(resolved)
    assert created.kwargs["vllm_config"].observability_config.per_request_spec_decode_metrics == collected


def test_a_scheduler_class_of_the_user_stays(engine_config: EngineConfig) -> None:
    mine = "vllm_dllm.runtime.scheduling.DllmScheduler"
    assert engine_config(scheduler_cls=mine).scheduler_config.scheduler_cls == mine


# Models with full attention.

TINY_LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 64,
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 1,
    "mlp_hidden_size": 64,
    "max_sequence_length": 1024,
    "embedding_size": 512,
}


def test_full_attention_turns_off_what_a_text_that_is_computed_anew_has_no_use_for(
    engine_config: EngineConfig, hook_log: pytest.LogCaptureFixture
) -> None:
    resolved = engine_config(TINY_LLADA, enable_prefix_caching=True, max_num_scheduled_tokens=1500)
    assert not resolved.cache_config.enable_prefix_caching
    assert not resolved.scheduler_config.async_scheduling
    assert geometry_of(resolved).options.cache == "dual"
    assert (geometry_of(resolved).step_rows, geometry_of(resolved).rows_option) == (1500, "max_num_scheduled_tokens")
    assert "LLaDA models see the whole text, masks included: a prompt and its window" in hook_log.text


@pytest.mark.parametrize(
    ("rope", "positions", "max_model_len"),
    [
        pytest.param(None, 1024, 1024, id="a table that grows"),
        pytest.param({"type": "linear", "factor": 2.0}, 1024, 2048 - 31, id="linear"),
        pytest.param({"type": "dynamic", "factor": 2.0}, 1024, 1024 - 31, id="dynamic"),
        pytest.param({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024, 993, id="yarn"),
        pytest.param(
            {
                "type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            1024,
            1024 - 31,
            id="llama3",
        ),
    ],
)
def test_the_last_block_of_a_whole_text_stays_within_the_rotary_table(
    rope: dict[str, Any] | None,
    positions: int,
    max_model_len: int,
    engine_config: EngineConfig,
    hook_log: pytest.LogCaptureFixture,
) -> None:
    config = TINY_LLADA | {"max_sequence_length": positions, "rope_scaling": rope}
    resolved = engine_config(config, max_num_batched_tokens=4096, **dllm(block_length=32, generation_window=4096))
    assert resolved.model_config.max_model_len == geometry_of(resolved).max_model_len == max_model_len
    # The longest text, its last block whole, in whole blocks.
    longest_text = max_model_len + 31
    assert geometry_of(resolved).options.generation_window == longest_text // 32 * 32
    assert longest_text <= fit._num_positions(resolved.model_config.hf_config)
    assert ("Lowering max_model_len" in hook_log.text) == (rope is not None)


@pytest.mark.parametrize("length", [0, -3, "many", 2.5, True])
def test_a_default_length_that_is_none_is_refused(length: Any, engine_config: EngineConfig) -> None:
    """A request without max_tokens would get it, and never end."""
    arguments: dict[str, Any] = {"override_generation_config": {"max_new_tokens": length}}
    with pytest.raises(ValueError, match=f"max_new_tokens={length!r} of generation_config.json or .* at least 1"):
        engine_config(TINY_LLADA, **arguments)
    # Other families give such a request the rest of the context.
    engine_config(**arguments)


@pytest.mark.parametrize(
    ("arguments", "window", "rows"),
    [
        pytest.param({}, 1024, 1024, id="a thousand positions unless told otherwise"),
        pytest.param(dllm(generation_window=64), 64, 64, id="the user's"),
        pytest.param({"max_model_len": 100}, 128, 128, id="no more than the longest text and its last block"),
        pytest.param({"max_num_batched_tokens": 200, "max_num_seqs": 2}, 192, 192, id="nor than a step"),
        pytest.param(
            {"max_num_batched_tokens": 200, "max_num_seqs": 2, **dllm(generation_window=320)}, 192, 192, id="lowered"
        ),
        pytest.param(dllm(generation_window=64, max_drafts=3), 64, 64 + 3 * 32, id="drafts of a block each"),
        pytest.param(
            dllm(generation_window=64, max_drafts=3, cache="prefix"), 64, 4 * 64, id="drafts of a window each"
        ),
    ],
)
def test_the_generation_window_fits_the_text_and_the_step(
    arguments: dict[str, Any], window: int, rows: int, engine_config: EngineConfig
) -> None:
    resolved = engine_config(TINY_LLADA, **{"max_num_batched_tokens": 2048, **arguments})
    assert geometry_of(resolved).options.generation_window == window
    assert resolved.diffusion_config.canvas_length == rows


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        pytest.param(TINY_LLADA, dllm(eager=True), "eager=True is not allowed: .* LLaDA", id="eager"),
        pytest.param(
            TINY_LLADA,
            dllm(block_length=32, generation_window=48),
            "generation_window=48 is not a multiple of block_length=32",
            id="window",
        ),
        pytest.param(
            TINY_LLADA, dllm(cache="both"), "engine option cache='both' is not allowed: .*'none'.*'dual'", id="cache"
        ),
        pytest.param(
            TINY_LLADA, dllm(policy="best"), "engine option policy='best' is not allowed: .*'factor'", id="policy"
        ),
        pytest.param(
            TINY_LLADA,
            {"max_num_batched_tokens": 32, "max_num_seqs": 2, **dllm(block_length=32)},
            "max_num_batched_tokens=32 must be more than block_length=32",
            id="batch",
        ),
        pytest.param(
            TINY_LLADA,
            {"long_prefill_token_threshold": 700, "max_num_batched_tokens": 2048, **dllm(generation_window=64)},
            "long_prefill_token_threshold=700 is not allowed: LLaDA models compute a text whole",
            id="prefill chunk",
        ),
        pytest.param({}, dllm(cache="dual"), "cache='dual' is not allowed: blocks of SDAR models", id="SDAR's cache"),
        pytest.param({}, dllm(refresh_interval=2), "refresh_interval=2 is not allowed", id="SDAR's refreshes"),
        pytest.param({}, dllm(generation_window=64), "generation_window=64 is not allowed", id="SDAR's window"),
    ],
)
def test_what_full_attention_cannot_have_is_refused_and_the_others_have_no_cache_to_choose(
    config: dict[str, Any], arguments: dict[str, Any], message: str, engine_config: EngineConfig
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(config, **arguments)
