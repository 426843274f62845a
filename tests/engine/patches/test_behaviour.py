"""What the patches make vLLM do, as runtime shims or as diffs: ``test_diffs.py`` runs this file again."""

import argparse
import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from pydantic import BaseModel, ValidationError
from transformers import AutoConfig, LlamaConfig
from vllm import sampling_params
from vllm.config import (
    CUDAGraphMode,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    speculative,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader import utils as model_loader
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.utils import jit_monitor
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import IterationStats, PrefillStats, RequestSpecDecodeMetrics, RequestStateStats
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dllm.patches import apply_all, canvas_graphs
from vllm_dllm.versions import has_legacy_ray_executor

HONOURED = {
    "temperature": 0.6,
    "seed": 7,
    "min_p": 0.1,
    "min_tokens": 2,
    "logit_bias": {3: 1.5},
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
}


@pytest.fixture(autouse=True)
def _patched() -> None:
    apply_all()


class OwnSampler:
    """Configuration of a model whose sampler honours sampling parameters, except one."""

    canvas_length = 8
    diffusion_supports_sampling_params = True
    model_stat_loggers = ("vllm_dllm.observe.metrics.DiffusionStatLogger",)

    def validate_sampling_params(self, sampling_params: SamplingParams) -> None:
        if sampling_params.prompt_logprobs is not None:
            raise VLLMValidationError("no", parameter="prompt_logprobs")


def model_config(hf_config: object) -> SimpleNamespace:
    return SimpleNamespace(
        hf_config=hf_config,
        is_diffusion=hasattr(hf_config, "canvas_length"),
        max_logprobs=20,
        max_model_len=64,
        served_model_name="m",
        get_vocab_size=lambda: 100,
    )


def verify(params: SamplingParams, hf_config: object, *, backend: str = "auto", tokenizer: Any = None) -> None:
    params.verify(model_config(hf_config), None, SimpleNamespace(backend=backend), tokenizer)


@pytest.mark.parametrize("name", HONOURED)
def test_a_model_that_honours_a_parameter_gets_it(name: str) -> None:
    verify(SamplingParams(**{name: HONOURED[name]}), OwnSampler())


@pytest.mark.parametrize("name", HONOURED)
def test_other_diffusion_models_still_refuse_it(name: str) -> None:
    with pytest.raises(VLLMValidationError, match="not yet supported with diffusion models"):
        verify(SamplingParams(**{name: HONOURED[name]}), SimpleNamespace(canvas_length=8))


def test_the_model_validates_what_its_sampler_cannot_honour() -> None:
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        verify(SamplingParams(prompt_logprobs=1), OwnSampler())


def test_autoregressive_models_are_validated_as_before() -> None:
    verify(SamplingParams(prompt_logprobs=1, **HONOURED), SimpleNamespace())


def test_structured_outputs_stay_refused() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(VLLMValidationError, match="Structured outputs are not yet supported for diffusion"):
        verify(params, OwnSampler())


class OwnGrammars(OwnSampler):
    """Configuration of a model whose sampler honours grammars, too."""

    diffusion_structured_output_backends = ("xgrammar", "guidance")


@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
def test_a_model_that_honours_structured_outputs_gets_them(backend: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    verify(params, OwnGrammars(), backend=backend, tokenizer=MagicMock())
    assert params.structured_outputs is not None
    assert params.structured_outputs._backend == "xgrammar"


def test_a_wrong_constraint_is_refused_as_for_any_model() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=" "))
    with pytest.raises(VLLMValidationError, match="cannot be an empty string"):
        verify(params, OwnGrammars(), tokenizer=MagicMock())


def test_a_grammar_that_cannot_go_back_is_refused_for_diffusion_models() -> None:
    for backend in ("outlines", "lm-format-enforcer"):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        with pytest.raises(VLLMValidationError, match=f"'{backend}'.*xgrammar or guidance"):
            verify(params, OwnGrammars(), backend=backend, tokenizer=MagicMock())
        again = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        verify(again, SimpleNamespace(), backend=backend, tokenizer=MagicMock())


def llama(directory: Path, **extra: Any) -> ModelConfig:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        **extra,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig(model=str(directory), skip_tokenizer_init=True)


def engine_config(directory: Path, level: str, **extra: int) -> VllmConfig:
    return VllmConfig(
        model_config=llama(directory, **extra),
        observability_config=ObservabilityConfig(per_request_spec_decode_metrics=level),
    )


def test_request_metrics_can_be_switched_on_for_a_diffusion_model(tmp_path: Path) -> None:
    config = engine_config(tmp_path, "detailed", canvas_length=8)
    assert config.observability_config.per_request_spec_decode_metrics == "detailed"


def test_request_metrics_still_need_speculative_decoding_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speculative decoding"):
        engine_config(tmp_path, "summary")


def test_a_finished_request_hands_its_observations_to_the_loggers() -> None:
    observations = RequestSpecDecodeMetrics.new(4)
    request = SimpleNamespace(
        external_req_id="r",
        request_id="r-1",
        prompt_len=3,
        max_tokens_param=8,
        stats=RequestStateStats(arrival_time=1.0),
        num_cached_tokens=0,
        lora_name=None,
        parent_req=None,
        spec_decode_metrics=observations,
    )
    processor = SimpleNamespace(lora_states=SimpleNamespace(request_finished=lambda *_: None))
    iteration = IterationStats()
    OutputProcessor._update_stats_from_finished(processor, request, FinishReason.STOP, iteration)
    assert iteration.finished_requests[0].spec_decode_metrics is observations
    OutputProcessor._update_stats_from_finished(processor, request, FinishReason.STOP, None)


class NoPrometheus(loggers.AggregateStatLoggerBase):
    """Stands in for vLLM's own Prometheus logger, which wants a whole configuration."""

    def __init__(self, vllm_config: object, engine_indexes: list[int]) -> None: ...

    def record(self, *_: object, **__: object) -> None: ...

    def log_engine_initialized(self) -> None: ...


@pytest.fixture
def _no_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "PrometheusStatLogger", NoPrometheus)


def logger_names(hf_config: object, **arguments: object) -> list[str]:
    manager = loggers.StatLoggerManager(
        SimpleNamespace(model_config=model_config(hf_config)),
        enable_default_loggers=False,
        **arguments,
    )
    return [type(logger).__name__ for logger in manager.stat_loggers]


@pytest.mark.usefixtures("_no_prometheus")
def test_the_loggers_a_model_names_are_built_for_it() -> None:
    assert logger_names(OwnSampler()) == ["DiffusionStatLogger", "NoPrometheus"]
    # Before those of the user, which shall not see what is the model's.
    assert logger_names(OwnSampler(), custom_stat_loggers=[NoPrometheus]) == ["DiffusionStatLogger", "NoPrometheus"]


@pytest.mark.usefixtures("_no_prometheus")
def test_other_models_get_no_logger_and_no_metric() -> None:
    from vllm_dllm.observe import metrics

    while metrics._collectors:
        REGISTRY.unregister(metrics._collectors.pop())
    assert logger_names(SimpleNamespace()) == ["NoPrometheus"]
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("vllm_dllm")]


def run_beam_search(is_diffusion: bool, online: bool) -> None:
    server = SimpleNamespace(model_config=SimpleNamespace(is_diffusion=is_diffusion))
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    if online:
        asyncio.run(anext(BeamSearchOnlineMixin.beam_search(server, {}, "r", params)))
    else:
        BeamSearchOfflineMixin.beam_search(server, [], params)


@pytest.mark.parametrize("online", [False, True])
def test_beam_search_of_a_diffusion_model_is_refused(online: bool) -> None:
    with pytest.raises(VLLMValidationError, match="Beam search is not supported for diffusion"):
        run_beam_search(is_diffusion=True, online=online)


@pytest.mark.parametrize("online", [False, True])
def test_beam_search_of_other_models_goes_on(online: bool) -> None:
    # It gets as far as the engine, which the fake server does not have.
    with pytest.raises(AttributeError, match=r"engine_client|llm_engine"):
        run_beam_search(is_diffusion=False, online=online)


class OwnMethod:
    """Configuration of a model that implements a speculative method itself."""

    def resolve_speculative_config(
        self, speculative_config: dict[str, object], additional_config: dict[str, object]
    ) -> dict[str, object]:
        return {**additional_config, "asked": speculative_config}


def target(hf_config: object) -> SimpleNamespace:
    return SimpleNamespace(hf_config=hf_config, architecture="OwnForCausalLM")


def command_line(*words: str) -> argparse.Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(["--additional-config", '{"kept": 1}', *words])


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--speculative-config", '{"method": "own", "some-key": 2}'], {"method": "own", "some_key": 2}),
        (["--speculative-config", "own"], {"method": "own"}),
        (
            ["--speculative-config", "own", "--spec-model", "m", "--spec-tokens", "3"],
            {"method": "own", "model": "m", "num_speculative_tokens": 3},
        ),
        (["--spec-method", "own"], {"method": "own"}),
    ],
)
def test_a_model_takes_over_what_is_asked_of_its_own_method(words: list[str], asked: dict[str, object]) -> None:
    arguments = EngineArgs.from_cli_args(command_line(*words))
    assert arguments.create_speculative_config(target(OwnMethod()), ParallelConfig()) is None
    assert arguments.additional_config == {"kept": 1, "asked": asked}


def test_a_model_with_a_method_of_its_own_runs_without_it_unless_asked() -> None:
    arguments = EngineArgs.from_cli_args(command_line())
    assert arguments.create_speculative_config(target(OwnMethod()), ParallelConfig()) is None
    assert arguments.additional_config == {"kept": 1}


def test_a_key_that_is_given_twice_is_refused_for_such_a_model() -> None:
    arguments = EngineArgs.from_cli_args(command_line("--speculative-config", "own", "--spec-method", "own"))
    with pytest.raises(ValueError, match="mutually exclusive"):
        arguments.create_speculative_config(target(OwnMethod()), ParallelConfig())


@pytest.mark.parametrize("words", [("--speculative-config", "own"), ("--spec-method", "own")])
def test_other_models_refuse_a_method_that_vllm_does_not_know(words: tuple[str, str]) -> None:
    arguments = EngineArgs.from_cli_args(command_line(*words))
    with pytest.raises(ValueError, match=r"'own' is not implemented by OwnForCausalLM\. Allowed: ngram, "):
        arguments.create_speculative_config(target(SimpleNamespace()), ParallelConfig())


def test_a_bare_name_is_short_for_a_method_of_vllm(tmp_path: Path) -> None:
    config = EngineArgs(speculative_config="ngram", spec_tokens=2).create_speculative_config(
        llama(tmp_path), ParallelConfig()
    )
    assert (config.method, config.num_speculative_tokens) == ("ngram", 2)


def test_every_api_server_can_start_from_the_same_arguments(tmp_path: Path) -> None:
    namespace = command_line("--speculative-config", "ngram", "--spec-tokens", "2")
    for _ in range(2):
        arguments = EngineArgs.from_cli_args(namespace)
        assert arguments.create_speculative_config(llama(tmp_path), ParallelConfig()).num_speculative_tokens == 2


def test_the_command_line_refuses_what_is_neither_json_nor_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line("--speculative-config", '{"method": ')
    assert "--speculative-config" in capsys.readouterr().err


def test_the_help_of_spec_method_lists_the_methods_of_vllm() -> None:
    assert "'draft_model'" in EngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()


@pytest.mark.parametrize(("given", "largest", "resolved"), [(None, 3, 3), (None, None, 128), (7, 3, 7)])
def test_a_default_of_max_num_seqs_is_known_as_one_and_may_be_bounded(
    given: int | None, largest: int | None, resolved: int
) -> None:
    arguments = EngineArgs(model="m", max_num_seqs=given, enable_chunked_prefill=True)
    model = SimpleNamespace(max_model_len=64, is_multimodal_model=False, largest_default_max_num_seqs=largest)
    arguments._set_default_max_num_seqs_and_batched_tokens_args(None, model, ParallelConfig())
    assert (arguments.max_num_seqs, model.max_num_seqs_is_default) == (resolved, given is None)


def admit(hf_config: object, prompt: list[int], params: SamplingParams, request_id: str = "r", **ids: str) -> Any:
    """What a front end does with a request before the engine hears of it."""
    parallel_config = SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False)
    processor = SimpleNamespace(
        model_config=model_config(hf_config),
        vllm_config=SimpleNamespace(parallel_config=parallel_config),
        tokenizer=None,
        generation_config_fields={},
        renderer=SimpleNamespace(get_eos_token_id=lambda: None),
        _validate_params=lambda *_: object(),
        _validate_lora=lambda *_: None,
        _validate_model_inputs=lambda *_: None,
        apply_watermarking=lambda *_: None,
    )
    engine_input = {"type": "token", "prompt_token_ids": prompt}
    return InputProcessor.process_inputs(processor, request_id, engine_input, params, ("generate",), **ids)


class WholeText(OwnSampler):
    """Configuration of a model that computes prompt and answer together, in at most 8 rows."""

    def diffusion_validate_request(self, prompt: list[int], params: SamplingParams, resumable: bool) -> None:
        if len(prompt) + params.max_tokens > 8 or resumable:
            raise VLLMValidationError(f"{len(prompt)} and {params.max_tokens}", parameter="max_tokens")


def test_a_model_may_refuse_a_request_as_a_whole() -> None:
    admit(WholeText(), [1, 2, 3], SamplingParams(max_tokens=5))
    with pytest.raises(VLLMValidationError, match="3 and 6"):
        admit(WholeText(), [1, 2, 3], SamplingParams(max_tokens=6))


@pytest.mark.skipif(not hasattr(AsyncLLM, "_validate_resumable_request"), reason="this vLLM refuses no sessions")
def test_a_model_that_may_refuse_a_request_is_asked_about_streaming_sessions() -> None:
    def validate(hf_config: Any) -> None:
        config = SimpleNamespace(hf_config=hf_config, is_diffusion=True)
        vllm_config = SimpleNamespace(is_mm_encoder_only=False)
        AsyncLLM._validate_resumable_request(SimpleNamespace(model_config=config, vllm_config=vllm_config))

    validate(WholeText())
    with pytest.raises(VLLMValidationError, match="not supported"):
        validate(OwnSampler())


def test_it_sees_what_an_open_max_tokens_comes_to() -> None:
    with pytest.raises(VLLMValidationError, match="3 and 61"):
        admit(WholeText(), [1, 2, 3], SamplingParams(max_tokens=None))


class ShortAnswers(OwnSampler):
    """Configuration of a model with a default of its own."""

    diffusion_default_max_tokens = 20


@pytest.mark.parametrize(
    ("length", "params", "expected"),
    [(3, {}, 20), (50, {}, 14), (3, {"min_tokens": 25}, 25), (3, {"max_tokens": 40}, 40), (3, {"max_tokens": 7}, 7)],
)
def test_a_model_may_say_what_an_open_max_tokens_comes_to(
    length: int, params: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(ShortAnswers())
    config.get_diff_sampling_param = lambda: {"max_tokens": 20}
    monkeypatch.setitem(globals(), "model_config", lambda _: config)
    request = admit(None, list(range(length)), SamplingParams(**{"max_tokens": None, **params}))
    assert request.sampling_params.max_tokens == expected


@pytest.mark.parametrize(
    ("source", "stored", "overridden", "expected"),
    [
        ("auto", None, None, 20),
        ("auto", 30, None, 30),
        ("vllm", 30, None, 20),
        ("auto", 30, 40, 40),
        ("d", None, None, None),
    ],
)
def test_the_checkpoints_generation_config_precedes_the_models_default(
    source: str, stored: int | None, overridden: int | None, expected: int | None
) -> None:
    config = SimpleNamespace(
        hf_config=ShortAnswers(),
        generation_config=source,
        try_get_generation_config=lambda: {} if stored is None else {"max_new_tokens": stored},
        override_generation_config={} if overridden is None else {"max_new_tokens": overridden},
    )
    assert ModelConfig.get_diff_sampling_param(config).get("max_tokens") == expected


def test_other_models_are_not_asked() -> None:
    admit(OwnSampler(), [1, 2, 3], SamplingParams(max_tokens=60))


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest], ids=lambda model: model.__name__)
@pytest.mark.parametrize("constraints", [["regex"], "regex", 1])
def test_constraints_that_are_no_object_are_refused_by_their_type(model: type[BaseModel], constraints: Any) -> None:
    body = {"model": "m", "prompt": "p", "messages": [{"role": "user", "content": "p"}]}
    with pytest.raises(ValidationError, match=r"structured_outputs\n.*should be a dictionary"):
        model.model_validate(body | {"structured_outputs": constraints})
    with pytest.raises(VLLMValidationError, match="only use one kind of constraints"):
        model.model_validate(body | {"structured_outputs": {"regex": "a", "choice": ["a"]}})
    for allowed in ({"regex": "a"}, None, StructuredOutputsParams(regex="a")):
        model.model_validate(body | {"structured_outputs": allowed})


@pytest.mark.parametrize("name", ["request_id", "session_id"])
def test_an_id_that_cannot_be_encoded_is_refused(name: str) -> None:
    params = SamplingParams(max_tokens=5)
    with pytest.raises(VLLMValidationError, match=rf"{name}='a\\udfff' has half of a surrogate pair"):
        admit(OwnSampler(), [1, 2, 3], params, **{name: "a\udfff"})
    admit(OwnSampler(), [1, 2, 3], params, **{name: "\N{SNOWMAN}"})


REQUESTS = (CompletionRequest, ChatCompletionRequest, ResponsesRequest, AnthropicMessagesRequest)


@pytest.fixture
def plugin_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options ``plug_*`` of a plugin, for models whose configuration has the attribute ``reads_plug``."""
    monkeypatch.setitem(sampling_params.PLUGIN_ARG_PREFIXES, "plug_", "reads_plug")


@pytest.mark.usefixtures("plugin_options")
@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_an_option_of_a_plugin_beside_vllm_xargs_is_refused(model: Any) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [], "max_tokens": 4}
    body |= {"input": "p"} if model is ResponsesRequest else {"prompt": "p"}

    def admit_body(**fields: Any) -> None:
        request = model.model_validate(body | fields)
        if model is not AnthropicMessagesRequest:
            request.to_sampling_params(4, {})

    misplaced: tuple[tuple[str, dict[str, Any]], ...] = (
        ("a request", {"plug_a": 1}),
        ("extra_args", {"extra_args": {"plug_a": 1}}),
        ("extra_body.vllm_xargs", {"extra_body": {"vllm_xargs": {"plug_a": 1}}}),
        ("sampling_params.extra_args", {"sampling_params": {"extra_args": {"plug_a": 1}}}),
    )
    for place, fields in misplaced:
        with pytest.raises(VLLMValidationError, match=f"'plug_a' is not a field of {place}: .* belong in vllm_xargs"):
            admit_body(**fields)
    admit_body(vllm_xargs={"plug_a": 1}, plugged=1, extra_body={"plugged": 1}, metadata={"plug_a": "1"})


@pytest.mark.usefixtures("plugin_options")
@pytest.mark.parametrize(
    ("place", "fields"),
    [
        ("a request", {"plug_a": 1}),
        ("vllm_xargs", {"vllm_xargs": {"plug_a": 1}}),
        ("extra_args", {"extra_args": {"plug_a": 1}}),
        ("sampling_params", {"sampling_params": {"plug_a": 1}}),
        ("sampling_params.vllm_xargs", {"sampling_params": {"vllm_xargs": {"plug_a": 1}}}),
    ],
)
def test_an_option_of_a_plugin_beside_extra_args_is_refused(place: str, fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": {"extra_args": {"plug_a": 1}}}
    wanted = f"'plug_a' is not a field of {place}: .* in sampling_params.extra_args"
    with pytest.raises(VLLMValidationError, match=wanted):
        GenerateRequest.model_validate(body | fields)
    request = GenerateRequest.model_validate(body | {"plugged": 1, "vllm_xargs": {"plugged": 1}})
    assert request.sampling_params.extra_args == {"plug_a": 1}


@pytest.mark.usefixtures("plugin_options")
def test_an_option_of_a_plugin_is_refused_by_models_that_do_not_read_it() -> None:
    def verify(config: Any) -> None:
        model = SimpleNamespace(hf_config=config, architecture="Own", is_diffusion=False, max_logprobs=20)
        with contextlib.suppress(AttributeError):  # of what vLLM looks at next
            SamplingParams(extra_args={"plug_a": 1}).verify(model, None, None, None)

    verify(SimpleNamespace(reads_plug=True))
    with pytest.raises(VLLMValidationError, match="'plug_a' is an option of other models: Own does not read options"):
        verify(SimpleNamespace())


@pytest.mark.usefixtures("plugin_options")
def test_an_option_of_a_plugin_in_an_object_of_extra_args_is_refused() -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(reads_plug=True), architecture="Own", is_diffusion=False)
    for place in ("vllm_xargs", "extra_args"):
        with pytest.raises(
            VLLMValidationError, match=f"'plug_a' is not a field of extra_args.{place}: .* belong in extra_args"
        ):
            SamplingParams(extra_args={place: {"plug_a": 1}}).verify(model, None, None, None)


@pytest.mark.usefixtures("plugin_options")
def test_engine_options_of_a_plugin_are_refused_by_models_that_do_not_read_them(tmp_path: Path) -> None:
    def start(additional_config: dict[str, Any], **extra: Any) -> VllmConfig:
        return VllmConfig(model_config=llama(tmp_path, **extra), additional_config=additional_config)

    for additional_config in ({}, {"plug": {}}, {"plugged": {"a": 1}}):
        assert start(additional_config).additional_config == additional_config
    assert start({"plug": {"a": 1}}, reads_plug=True).additional_config == {"plug": {"a": 1}}
    with pytest.raises(ValueError, match=r"additional_config\['plug'\] is for other models: LlamaForCausalLM does not"):
        start({"plug": {"a": 1}})


class OwnDrafterConfig(LlamaConfig):
    """Configuration of a draft model whose class brings its own speculator."""

    model_type = "own_drafter"
    draft_scheduler_cls: ClassVar[str] = "own.Scheduler"

    def draft_slots(self, num_speculative_tokens: int) -> int:
        return 2 * num_speculative_tokens + 1

    def draft_lookahead(self, num_speculative_tokens: int) -> int:
        return num_speculative_tokens + 5


AutoConfig.register("own_drafter", OwnDrafterConfig)

OWN = {"model_type": "own_drafter", "architectures": ["LlamaForCausalLM"]}


def drafted_by(directory: Path, arguments: dict[str, Any] | None = None, **drafter: Any) -> VllmConfig:
    """The configuration of an engine whose target is an autoregressive model of 64 tokens."""
    llama(directory / "target")
    llama(directory / "drafter", **drafter)
    return EngineArgs(
        model=str(directory / "target"),
        skip_tokenizer_init=True,
        speculative_config={"method": "draft_model", "model": str(directory / "drafter"), "num_speculative_tokens": 3},
        **(arguments or {}),
    ).create_engine_config()


def test_a_draft_model_with_its_own_speculator_says_what_it_needs(tmp_path: Path) -> None:
    config = drafted_by(tmp_path, **OWN)
    assert config.speculative_config.max_num_new_slots_for_drafting == 7
    assert config.num_lookahead_tokens == 8
    assert config.scheduler_config.scheduler_cls == "own.Scheduler"


def test_a_scheduler_that_was_asked_for_stays(tmp_path: Path) -> None:
    config = drafted_by(tmp_path, {"scheduler_cls": "asked.Scheduler"}, **OWN)
    assert config.scheduler_config.scheduler_cls == "asked.Scheduler"


def test_its_vocabulary_may_have_another_width(tmp_path: Path) -> None:
    config = drafted_by(tmp_path, vocab_size=48, **OWN)
    assert config.speculative_config.draft_model_config.get_vocab_size() == 48


def test_its_context_may_be_shorter_than_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = drafted_by(tmp_path, max_position_embeddings=32, **OWN)
    assert config.speculative_config.draft_model_config.max_model_len == 32
    assert config.model_config.max_model_len == 64


def test_it_may_refuse_sampling_parameters() -> None:
    seen: list[SamplingParams] = []
    config = SpeculativeConfig.__new__(SpeculativeConfig)
    config.method = "draft_model"
    config.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(validate_drafted_params=seen.append))
    params = SamplingParams()
    params._validate_spec_decode(config)
    assert seen == [params]
    config.draft_model_config.hf_config = SimpleNamespace()
    params._validate_spec_decode(config)
    params._validate_spec_decode(None)
    assert seen == [params]


def test_other_draft_models_are_set_up_as_before(tmp_path: Path) -> None:
    config = drafted_by(tmp_path)
    assert config.speculative_config.max_num_new_slots_for_drafting == 1
    assert config.num_lookahead_tokens == 3
    assert config.scheduler_config.scheduler_cls is None
    with pytest.raises(ValueError, match="same vocabulary size"):
        drafted_by(tmp_path, vocab_size=48)


def test_engines_without_a_draft_model_are_set_up_as_before(tmp_path: Path) -> None:
    llama(tmp_path)
    arguments = {"model": str(tmp_path), "skip_tokenizer_init": True}
    ngram = EngineArgs(speculative_config="ngram", spec_tokens=2, **arguments).create_engine_config()
    assert (ngram.speculative_config.max_num_new_slots_for_drafting, ngram.num_lookahead_tokens) == (0, 0)
    assert EngineArgs(**arguments).create_engine_config().num_lookahead_tokens == 0


class Speculator:
    """Takes what it is built with."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class VLLMSpeculator(Speculator):
    """Stands in for that of autoregressive draft models, which wants a device."""


@pytest.mark.parametrize("own", [True, False])
def test_a_draft_model_may_bring_its_own_speculator(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The runner's own name for it, so that it is known to get there.
    from vllm.v1.worker.gpu.model_runner import init_speculator
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

    models = {"d": SimpleNamespace(get_speculator_cls=lambda: Speculator) if own else SimpleNamespace()}
    monkeypatch.setattr(model_loader, "get_model_cls", models.get)
    monkeypatch.setattr(speculator, "StandaloneARSpeculator", VLLMSpeculator)
    draft_model = SpeculativeConfig.__new__(SpeculativeConfig)
    draft_model.method, draft_model.draft_model_config = "draft_model", "d"
    config = SimpleNamespace(speculative_config=draft_model)
    made = init_speculator(config, "device", "states")
    assert type(made) is (Speculator if own else VLLMSpeculator)
    assert made.arguments == ((config, "device", "states") if own else (config, "device"))


@pytest.fixture
def asked_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the method ``plugged`` of a plugin is asked for."""
    calls: list[tuple[object, ...]] = []

    def create(asked: dict[str, Any], target: ModelConfig, parallel: ParallelConfig) -> SpeculativeConfig:
        calls.append((asked, target, parallel))
        return SpeculativeConfig(
            method="draft_model",
            model=asked["model"],
            num_speculative_tokens=asked["num_speculative_tokens"],
            target_model_config=target,
            target_parallel_config=parallel,
        )

    monkeypatch.setitem(speculative.SPECULATIVE_METHODS, "plugged", create)
    return calls


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", '{"method": "plugged", "model": "MODEL", "num-speculative-tokens": 3, "its_own": 1}'],
        [
            *("--speculative-config.method", "plugged", "--speculative-config.its_own", "1"),
            *("--spec-model", "MODEL", "--spec-tokens", "3"),
        ],
    ],
)
def test_a_plugin_makes_the_configuration_for_its_method(
    words: list[str], asked_of_a_plugin: list[tuple[object, ...]], tmp_path: Path
) -> None:
    own = llama(tmp_path / "drafter", **OWN)
    target_model, parallel = llama(tmp_path / "target"), ParallelConfig()
    arguments = EngineArgs.from_cli_args(command_line(*(word.replace("MODEL", own.model) for word in words)))
    config = arguments.create_speculative_config(target_model, parallel)
    asked = {"method": "plugged", "model": own.model, "num_speculative_tokens": 3, "its_own": 1}
    assert asked_of_a_plugin == [(asked, target_model, parallel)]
    assert config.draft_model_config.model == own.model


def test_an_engine_with_the_method_of_a_plugin_gets_its_drafters_scheduler(
    asked_of_a_plugin: list[tuple[object, ...]], tmp_path: Path
) -> None:
    own, its_target = llama(tmp_path / "drafter", **OWN), llama(tmp_path / "target")
    arguments = EngineArgs(
        model=its_target.model,
        skip_tokenizer_init=True,
        speculative_config="plugged",
        spec_model=own.model,
        spec_tokens=3,
    )
    config = arguments.create_engine_config()
    assert len(asked_of_a_plugin) == 1
    assert config.num_lookahead_tokens == 8
    assert config.scheduler_config.scheduler_cls == "own.Scheduler"


def test_a_model_with_methods_of_its_own_comes_before_plugins(
    asked_of_a_plugin: list[tuple[object, ...]],
) -> None:
    arguments = EngineArgs.from_cli_args(command_line("--speculative-config", "plugged"))
    assert arguments.create_speculative_config(target(OwnMethod()), ParallelConfig()) is None
    assert arguments.additional_config == {"kept": 1, "asked": {"method": "plugged"}}
    assert not asked_of_a_plugin


@pytest.mark.usefixtures("asked_of_a_plugin")
def test_methods_of_plugins_are_among_those_allowed() -> None:
    arguments = EngineArgs.from_cli_args(command_line("--speculative-config", "plugin"))
    with pytest.raises(ValueError, match=r"'plugin' is not implemented by OwnForCausalLM\. Allowed: ngram, .*plugged"):
        arguments.create_speculative_config(target(SimpleNamespace()), ParallelConfig())


@pytest.fixture
def ray_config(tmp_path: Path) -> VllmConfig:
    """Of an engine whose ranks are Ray workers."""
    llama(tmp_path)
    arguments = {"model": str(tmp_path), "skip_tokenizer_init": True, "distributed_executor_backend": "ray"}
    return EngineArgs(**arguments, tensor_parallel_size=2).create_engine_config()


def ray_worker(config: VllmConfig, rank: int) -> Any:
    """What Ray's actor of a rank holds before it starts to work."""
    from vllm.v1.executor import ray_executor_v2

    return ray_executor_v2.RayWorkerProc(config, rank, input_shm_handle=None, is_driver_worker=rank == 0)


@pytest.mark.usefixtures("ray_config")
def test_ray_places_workers_on_its_cpus() -> None:
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    assert current_platform.ray_device_key == "CPU"
    # Or Ray would look for a processor beside those that their bundles hold.
    assert RayExecutorV2._get_actor_resource_kwargs() == {"num_gpus": 0}


def test_a_worker_on_a_cpu_is_known_by_its_rank(ray_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a node"))
    assert ray_worker(ray_config, rank=3).get_node_and_physical_gpu_ids() == ("a node", [3])


@pytest.mark.parametrize(
    ("bound", "affinity", "threads"), [("0,1|4-6", {4, 5, 6}, 3), ("nobind", None, None)], ids=["bound", "free"]
)
def test_a_worker_on_a_cpu_runs_on_the_processors_of_its_rank_on_its_node(
    bound: str,
    affinity: set[int] | None,
    threads: int | None,
    ray_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    seen: dict[str, Any] = {"affinity": None, "threads": None}
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: seen.update(affinity=set(cpus)))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: seen.update(threads=number))

    def start(self: WorkerProc, local_rank: int, **kwargs: Any) -> None:
        seen.update(before_start=(seen["affinity"], seen["threads"]), local_rank=local_rank, **kwargs)

    monkeypatch.setattr(WorkerProc, "__init__", start)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    monkeypatch.setenv("OF_THE_NODE", "stays")
    monkeypatch.delenv("OF_THE_DRIVER", raising=False)
    # The third of four ranks, the second of the two on its node.
    travelling = {"OF_THE_NODE": "changed", "OF_THE_DRIVER": "arrives"}
    ray_worker(ray_config, rank=3).initialize_worker(
        1, {}, "tcp://host:1", travelling, assigned_physical_gpu_ids=[1, 3]
    )
    assert seen["before_start"] == (affinity, threads)
    assert (seen["rank"], seen["local_rank"], seen["distributed_init_method"]) == (3, 1, "tcp://host:1")
    assert seen["vllm_config"].parallel_config.assigned_physical_gpu_ids is None
    assert (os.environ["OF_THE_NODE"], os.environ.pop("OF_THE_DRIVER")) == ("stays", "arrives")


@pytest.mark.usefixtures("ray_config")
def test_names_of_processors_stay_on_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.ray_env_utils import get_driver_env_vars
    from vllm.v1.executor.ray_executor_v2 import WORKER_SPECIFIC_ENV_VARS

    own = ("VLLM_CPU_OMP_THREADS_BIND", "CPU_VISIBLE_MEMORY_NODES")
    for name in (*own, "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "dllm")
    travelling = get_driver_env_vars(WORKER_SPECIFIC_ENV_VARS)
    assert travelling["VLLM_PLUGINS"] == "dllm"
    assert not travelling.keys() & set(own)


@pytest.mark.usefixtures("ray_config")
@pytest.mark.parametrize("same_memory", [True, False])
def test_ranks_reduce_in_shared_memory_only_where_they_share_it(
    same_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gather(names: list[str], name: str, group: object) -> None:
        names[:] = [name] * len(names)  # they met at the same port

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    monkeypatch.setattr(parallel_state, "in_the_same_node_as", lambda group: [True, same_memory])
    monkeypatch.setenv("VLLM_DIST_IDENT", "29500")
    group = SimpleNamespace(unique_name="tp:0", ranks=[0, 1], world_size=2, device_group=None, cpu_group=None)
    assert CpuCommunicator._all_group_ranks_share_shm_group_name(group) is same_memory


@pytest.mark.skipif(not has_legacy_ray_executor(), reason="this vLLM has no legacy Ray executor")
def test_the_legacy_ray_executor_is_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    llama(tmp_path)
    arguments = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, distributed_executor_backend="ray")
    with pytest.raises(ValueError, match=r"legacy Ray executor .* VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"):
        arguments.create_engine_config()


def test_data_parallelism_by_ray_is_refused_on_a_cpu(tmp_path: Path) -> None:
    llama(tmp_path)
    arguments = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, data_parallel_size=2, data_parallel_backend="ray"
    )
    with pytest.raises(ValueError, match="--data-parallel-backend ray does not run on CPUs"):
        arguments.create_engine_config()


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_server_ends_with_the_error_of_its_engine(is_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import FastAPI
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.utils.server_utils import lifespan
    from vllm.v1.engine.exceptions import EngineDeadError

    monkeypatch.setattr(asyncio.BaseEventLoop, "add_signal_handler", lambda *args: None, raising=False)
    app = FastAPI(lifespan=lifespan)
    app.state.log_stats = False
    app.state.engine_client = SimpleNamespace(errored=is_dead, is_running=not is_dead, dead_error=EngineDeadError())

    async def serve() -> None:
        task = asyncio.create_task(launcher.serve_http(app, sock=None, host="127.0.0.1", port=0, log_level="error"))
        while not hasattr(app.state, "server"):
            await asyncio.sleep(0)
        # As the launcher's watchdog does, which looks every five seconds.
        app.state.server.should_exit = True
        await (await task)

    with pytest.raises(EngineDeadError) if is_dead else contextlib.nullcontext():
        asyncio.run(serve())


@pytest.mark.parametrize("asks", [True, False])
def test_a_scheduler_may_take_steps_before_the_engine_takes_requests(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine import core

    # What an engine makes beside its scheduler.
    for name in ("StructuredOutputManager", "measure_encoder_output_widths", "engine_receiver_cache_from_config"):
        monkeypatch.setattr(core, name, MagicMock())
    for name in ("freeze_gc_heap", "maybe_attach_gc_debug_callback", "enable_envs_cache"):
        monkeypatch.setattr(core, name, MagicMock())
    monkeypatch.setattr(core, "resolve_kv_cache_block_sizes", lambda *_: (16, 16))
    monkeypatch.setattr(core.EngineCore, "_initialize_kv_caches", MagicMock())
    scheduler, executor_class = MagicMock(), MagicMock()
    scheduler.get_kv_connector.return_value = None
    if not asks:
        del scheduler.warm_up
    config = MagicMock(max_concurrent_batches=1)
    config.cache_config.enable_prefix_caching = False
    config.scheduler_config.get_scheduler_cls.return_value = lambda **_: scheduler
    core.EngineCore(config, executor_class, log_stats=False)
    if asks:
        scheduler.warm_up.assert_called_once_with(executor_class.return_value)


class Records(logging.Handler):
    """What vLLM logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
    logger, handler = logging.getLogger("vllm"), Records()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_engine_that_was_told_to_end_is_no_error(is_told: bool, log: list[logging.LogRecord]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    engine = SimpleNamespace(shutdown=MagicMock(), get_output_async=MagicMock(side_effect=EngineDeadError()))
    server = MagicMock(spec=AsyncLLM, output_handler=None, engine_core=engine, log_stats=False)
    server.logger_manager, server.renderer, server.output_processor = MagicMock(), MagicMock(), MagicMock()

    async def run() -> None:
        if is_told:
            AsyncLLM.shutdown(server, timeout=0)
        AsyncLLM._run_output_handler(server)
        await server.output_handler

    asyncio.run(run())
    (record,) = log
    assert (record.levelno, bool(record.exc_info)) == ((logging.INFO, False) if is_told else (logging.ERROR, True))
    # Its requests end all the same.
    server.output_processor.propagate_error.assert_called_once()


@pytest.mark.parametrize("is_refused", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_refused_stream_is_no_error(is_chat: bool, is_refused: bool, log: list[logging.LogRecord]) -> None:
    async def refuse() -> Any:
        raise VLLMValidationError("no") if is_refused else RuntimeError("broken")
        yield

    server = MagicMock(engine_client=SimpleNamespace(engine_core=SimpleNamespace()))
    if hasattr(OpenAIServingChat, "chat_completion_stream_generator_raw"):  # from vLLM 0.33 on
        server.chat_completion_stream_generator_raw = MethodType(
            OpenAIServingChat.chat_completion_stream_generator_raw, server
        )
        server._serialize_chat_stream_chunk.return_value = "chunk"
    if is_chat:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], stream=True)
        module = "vllm.entrypoints.openai.chat_completion.serving"
        stream = OpenAIServingChat.chat_completion_stream_generator(
            server, request, refuse(), "id", "model", [], MagicMock(), MagicMock(), None
        )
    else:
        request = CompletionRequest(prompt="x", stream=True)
        module = "vllm.entrypoints.openai.completion.serving"
        stream = OpenAIServingCompletion.completion_stream_generator(
            server, request, [], refuse(), "id", 0, "model", 1, MagicMock(), MagicMock()
        )

    async def read() -> list[Any]:
        return [chunk async for chunk in stream]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.should_include_usage", lambda *_: (False, False))
        assert asyncio.run(read())  # the client gets the error
    (record,) = log
    assert (record.levelno, bool(record.exc_info)) == ((logging.INFO, False) if is_refused else (logging.ERROR, True))
    assert ("no" in record.getMessage()) == is_refused


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_refused_message_is_no_error(is_refused: bool, log: list[logging.LogRecord]) -> None:
    engine = SimpleNamespace(engine_core=SimpleNamespace())
    create = AsyncMock(side_effect=VLLMValidationError("no") if is_refused else RuntimeError("broken"))
    handler = SimpleNamespace(create_messages=create, engine_client=engine)
    state = SimpleNamespace(anthropic_serving_messages=handler, enable_server_load_tracking=False)
    request = MagicMock(app=SimpleNamespace(state=state))
    answer = asyncio.run(inspect.unwrap(create_messages)(MagicMock(), request))
    assert answer.status_code == (400 if is_refused else 500)
    (record,) = log
    assert (record.levelno, bool(record.exc_info)) == ((logging.INFO, False) if is_refused else (logging.ERROR, True))


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_killing_processes_that_got_no_time_to_end_is_no_warning(timeout: float, log: list[logging.LogRecord]) -> None:
    from vllm.v1.engine import utils

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        unending = MagicMock(pid=process.pid)
        unending.name = "unending"
        unending.is_alive.return_value = True
        utils.shutdown([unending], timeout=timeout)
        assert process.wait(10) == -signal.SIGKILL
    levels = {record.levelno for record in log if "killing" in record.getMessage()}
    assert levels == {logging.WARNING if timeout else logging.INFO}


class FillsIn(OwnSampler):
    """Configuration of a model that fills in the middle."""

    diffusion_suffix_args: ClassVar = {"fills_in": "yes"}

    def diffusion_render_suffix(self, prompt: str, suffix: str, tokenizer: Any) -> str:
        return f"{prompt}{tokenizer.mask}{suffix}"


def rendered(hf_config: Any, request: CompletionRequest) -> str | None:
    """The text of a request with a suffix, whose other arguments are as they become."""
    model_config = SimpleNamespace(hf_config=hf_config, max_model_len=64)
    renderer = SimpleNamespace(model_config=model_config, get_tokenizer=lambda: SimpleNamespace(mask="<mask>"))
    request.build_tok_params(model_config)
    return BaseRenderer.render_completion_suffix(renderer, request.prompt, request.suffix)


def test_a_model_may_say_what_a_suffix_is_as_text() -> None:
    request = CompletionRequest(prompt="a ", suffix=" b", vllm_xargs={"other": 1})
    assert rendered(FillsIn(), request) == "a <mask> b"
    assert request.to_sampling_params(8, {}).extra_args == {"other": 1, "fills_in": "yes"}
    without = CompletionRequest(prompt="a ")
    without.build_tok_params(SimpleNamespace(hf_config=FillsIn(), max_model_len=64))
    assert without.vllm_xargs is None


def test_a_request_with_a_suffix_may_not_ask_for_the_contrary() -> None:
    request = CompletionRequest(prompt="a ", suffix=" b", vllm_xargs={"fills_in": "no"})
    with pytest.raises(
        VLLMValidationError, match="fills_in='no' does not go with suffix, which asks for fills_in='yes'"
    ):
        rendered(FillsIn(), request)
    assert rendered(FillsIn(), CompletionRequest(prompt="a ", suffix=" b", vllm_xargs={"fills_in": "yes"}))


def test_other_models_know_no_suffix() -> None:
    request = CompletionRequest(prompt="a ", suffix=" b")
    assert rendered(OwnSampler(), request) is None
    assert request.vllm_xargs is None


def reset_by(
    hf_config: Any, method: Any, *, error: Exception | None = None, args: tuple[Any, ...] = ()
) -> list[dict[str, bool]]:
    """How a call to the workers resets the prefix cache."""
    resets: list[dict[str, bool]] = []

    def collective_rpc(called: Any, *arguments: Any) -> list[Any]:
        if called != method:
            return [None]  # no reason against it
        if error is not None:
            raise error
        return ["done"]

    core = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config)),
        model_executor=SimpleNamespace(collective_rpc=collective_rpc),
        scheduler=SimpleNamespace(reset_prefix_cache=lambda **how: resets.append(how)),
    )
    if error is None:
        assert EngineCore.collective_rpc(core, method, None, args, {"weights_path": "x"}) == ["done"]
    else:
        with pytest.raises(type(error)):
            EngineCore.collective_rpc(core, method, args=args)
    return resets


class EmptiesCaches(OwnSampler):
    """Configuration of a model that has its caches emptied."""

    diffusion_weights_empty_caches = True


def load_my_weights(worker: Any) -> None:
    """A function that a trainer sends to the workers."""


class Loader:
    """An object that a trainer sends to the workers."""

    def __call__(self, worker: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("reload_weights", ()),
        ("finish_weight_update", ()),
        (load_my_weights, ()),
        (functools.partial(functools.partial(load_my_weights)), ()),
        (Loader(), ()),
        ("apply_model", (load_my_weights,)),
    ],
)
@pytest.mark.parametrize("error", [None, RuntimeError("half of them")])
def test_new_weights_empty_the_caches_of_a_model_that_asks_for_it(
    method: Any, args: tuple[Any, ...], error: Exception | None
) -> None:
    assert reset_by(EmptiesCaches(), method, error=error, args=args) == [{"reset_running_requests": True}]


def test_other_calls_and_models_keep_their_caches() -> None:
    assert reset_by(EmptiesCaches(), "add_lora") == []
    assert reset_by(EmptiesCaches(), "compute_weight_checksums") == []
    assert reset_by(EmptiesCaches(), "apply_model", args=(model_config,)) == []
    assert reset_by(OwnSampler(), "reload_weights") == []


def test_a_model_may_refuse_weights_before_its_own_go() -> None:
    calls: list[Any] = []

    def check(path: str | None, from_disk: bool) -> None:
        calls.append((path, from_disk))
        if path == "wrong":
            raise ValueError("another model's")

    workers = [SimpleNamespace(get_model=lambda: SimpleNamespace(check_new_weights=check)) for _ in range(2)]

    def collective_rpc(method: Any, timeout: float | None, args: Any, kwargs: Any = None) -> list[Any]:
        if isinstance(method, str):
            calls.append(method)
            return ["done"]
        return [method(worker, *args) for worker in workers]

    resets: list[dict[str, bool]] = []
    core = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=EmptiesCaches())),
        model_executor=SimpleNamespace(collective_rpc=collective_rpc),
        scheduler=SimpleNamespace(reset_prefix_cache=lambda **how: resets.append(how)),
    )
    for args, kwargs, asked in (
        ((), {"weights_path": "new"}, ("new", True)),
        ((None, "new"), {}, ("new", True)),
        ((), None, (None, True)),
        (([],), None, (None, False)),
    ):
        calls.clear()
        assert EngineCore.collective_rpc(core, "reload_weights", None, args, kwargs) == ["done"]
        assert calls == [asked, asked, "reload_weights"]
    assert len(resets) == 4
    with pytest.raises(ValueError, match="another model's"):
        EngineCore.collective_rpc(core, "reload_weights", kwargs={"weights_path": "wrong"})
    calls.clear()
    for args, kwargs, message in (
        ("abc", None, "must be a list and an object"),
        ((), [1], "must be a list and an object"),
        (("abc",), None, "weights_iterator of reload_weights must be tensors"),
        ((None, ["new"]), None, r"weights_path=\['new'\] of reload_weights must be the path"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineCore.collective_rpc(core, "reload_weights", None, args, kwargs)
    assert (calls, len(resets)) == ([], 4)
    workers[:] = [SimpleNamespace(get_model=SimpleNamespace)]
    assert EngineCore.collective_rpc(core, "reload_weights", kwargs={"weights_path": "wrong"}) == ["done"]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="other platforms pack nothing")
def test_experts_that_are_loaded_anew_on_a_cpu_are_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    packed: list[Any] = []
    experts = SimpleNamespace(process_weights_after_loading=packed.append)
    method = SimpleNamespace(moe_kernel=None, unquantized_backend=None)
    method._init_moe_kernel = lambda layer: setattr(method, "moe_kernel", SimpleNamespace(fused_experts=experts))
    monkeypatch.setattr(module, "convert_to_unquantized_kernel_format", lambda *_, w13_weight, w2_weight, **__: (1, 2))
    monkeypatch.setattr(module, "replace_parameter", lambda *_, **__: None)
    layer = SimpleNamespace(moe_config=None)
    for times in (1, 2):
        module.UnquantizedFusedMoEMethod._setup_kernel(method, layer, 1, 2)
        assert packed == [layer] * times


class SendsEvents(OwnSampler):
    """Configuration of a model that tells the tokens of each output to requests that ask for it."""

    def diffusion_stream_events(self, args: dict[str, Any] | None, tokenizer: Any) -> Any:
        if not (args or {}).get("events"):
            return None
        return lambda output, prompt: {"event": {"prompt": prompt, "tokens": output.outputs[0].token_ids}}


def output_of(token_ids: list[int], finish_reason: str | None = None) -> RequestOutput:
    completion = CompletionOutput(0, "x" * len(token_ids), token_ids, None, None, finish_reason=finish_reason)
    return RequestOutput("id", "p", [1, 2], None, [completion], finished=finish_reason is not None)


async def results(outputs: list[RequestOutput], closed: list[bool]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    try:
        for output in outputs:
            await asyncio.sleep(0)
            yield 0, output
    finally:
        closed.append(True)


def stream_of(hf_config: Any, args: dict[str, Any], outputs: list[RequestOutput], closed: list[bool]) -> Any:
    """The stream of a completion by a server without anything else."""
    off = (
        "enable_prompt_tokens_details",
        "enable_force_include_usage",
        "return_tokens_as_token_ids",
        "enable_log_outputs",
    )
    serving = MagicMock(spec=OpenAIServingCompletion, **dict.fromkeys(off, False), system_fingerprint=None)
    serving.model_config = SimpleNamespace(hf_config=hf_config)
    serving.enable_per_request_metrics = False
    request = CompletionRequest(model="m", prompt="p", stream=True, max_tokens=8, vllm_xargs=args)
    return OpenAIServingCompletion.completion_stream_generator(
        serving, request, [], results(outputs, closed), "id", 0, "m", num_prompts=1, tokenizer=None,
        request_metadata=MagicMock(),
    )  # fmt: skip


def read(stream: Any) -> list[Any]:
    async def chunks() -> list[str]:
        return [chunk async for chunk in stream]

    lines = [chunk.removeprefix("data: ").strip() for chunk in asyncio.run(chunks())]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


OUTPUTS = [([], None), ([], None), ([3, 4], None), ([], None), ([5], "length")]


def test_latencies_are_those_of_outputs_with_tokens() -> None:
    processor = OutputProcessor(None, log_stats=True, stream_interval=1)
    state = SimpleNamespace(is_prefilling=True, stats=RequestStateStats(arrival_time=1.0), lora_name=None)
    prefill: PrefillStats | None = PrefillStats(num_prompt_tokens=7)
    measured = []
    for tokens, finish_reason in OUTPUTS:
        output = EngineCoreOutput("0", new_token_ids=tokens, finish_reason=finish_reason and FinishReason.LENGTH)
        if tokens:
            output.prefill_stats, prefill = prefill, None
        measured.append(IterationStats())
        processor._update_stats_from_output(state, output, 1.0, measured[-1])
        state.is_prefilling = False  # as `process_outputs` has it then
    assert [len(each.time_to_first_tokens_iter) for each in measured] == [0, 0, 1, 0, 0]
    assert [len(each.inter_token_latencies_iter) for each in measured] == [0, 0, 0, 0, 1]
    assert sum(each.prompt_token_stats.total for each in measured) == 7


@pytest.mark.parametrize("count", [1, 40], ids=["few", "more than wait for a client"])
def test_a_model_may_send_events_between_the_chunks_of_a_stream(count: int) -> None:
    outputs = [output_of(*each) for each in OUTPUTS[:-1] * count + OUTPUTS[-1:]]
    chunks = read(stream_of(SendsEvents(), {"events": 1}, outputs, []))
    events = [chunk for chunk in chunks if "event" in chunk]
    assert [chunk["event"] for chunk in events] == [
        {"prompt": 0, "tokens": output.outputs[0].token_ids} for output in outputs
    ]
    assert all((chunk["id"], chunk["object"], chunk["choices"]) == ("id", "text_completion", []) for chunk in events)
    others = [chunk for chunk in chunks if "event" not in chunk]
    assert others == read(stream_of(OwnSampler(), {}, [o for o in outputs if o.outputs[0].token_ids], []))
    # An event precedes the text of its output.
    assert [*("event" in chunk for chunk in chunks[:4])] == [True, True, True, False]


@pytest.mark.parametrize(("hf_config", "args"), [(SendsEvents(), {}), (OwnSampler(), {"events": 1})])
def test_a_stream_without_events_is_left_alone(hf_config: Any, args: dict[str, Any]) -> None:
    stream = stream_of(hf_config, args, [output_of(*each) for each in OUTPUTS], [])
    original = inspect.unwrap(OpenAIServingCompletion.completion_stream_generator)
    assert stream.ag_code is original.__code__
    assert not [chunk for chunk in read(stream) if "event" in chunk]


def test_the_messages_api_which_converts_chunks_sends_no_events() -> None:
    serving = MagicMock(spec=AnthropicServingMessages)
    serving.model_config = SimpleNamespace(hf_config=SendsEvents())
    stream = OpenAIServingChat.chat_completion_stream_generator(
        serving, SimpleNamespace(vllm_xargs={"events": 1}, messages=[]), None, "id", "m", [], None, MagicMock()
    )
    assert stream.ag_code is inspect.unwrap(OpenAIServingChat.chat_completion_stream_generator).__code__


def test_a_reader_that_leaves_ends_a_stream_with_events() -> None:
    closed: list[bool] = []

    async def read_one() -> None:
        stream = stream_of(SendsEvents(), {"events": 1}, [output_of(*each) for each in OUTPUTS * 100], closed)
        assert "event" in await anext(stream)
        await stream.aclose()
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(read_one())
    assert closed


CANVAS = 8
"""Rows of a request in a step, at most."""
CAPTURED = [4, 12, 32]


def graphs_of(hf_config: Any, monkeypatch: pytest.MonkeyPatch) -> cudagraph_utils.ModelCudaGraphManager:
    """Captured graphs of a model."""
    canvas_graphs.give_to_runner()
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: None)
    manager = cudagraph_utils.ModelCudaGraphManager(
        SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf_config),
            scheduler_config=SimpleNamespace(max_num_seqs=5),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=CAPTURED, max_cudagraph_capture_size=max(CAPTURED)
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=None,
            num_speculative_tokens=CANVAS,
        ),
        torch.device("cpu"),
        CUDAGraphMode.FULL_DECODE_ONLY,
        decode_query_len=CANVAS,
    )
    manager._graphs_captured = True
    return manager


def graph_of(manager: cudagraph_utils.ModelCudaGraphManager, rows: dict[str, int], canvases: list[str]) -> int | None:
    """Rows of the graph that a step runs in; ``None``: it runs in none.

    Args:
        rows: of each request.
        canvases: requests that have a canvas. The prompts of all requests end within it.
    """
    runner: Any = SimpleNamespace(
        cudagraph_manager=manager,
        vllm_config=manager.vllm_config,
        model_config=manager.vllm_config.model_config,
        dp_size=1,
        decode_query_len=CANVAS,
        req_states=SimpleNamespace(
            req_id_to_index={request: at for at, request in enumerate(rows)},
            prefill_len=SimpleNamespace(np=np.full(len(rows), 10)),
            num_computed_prefill_tokens=np.full(len(rows), 8),
        ),
        use_pp=False,
        adaptive_verification=None,
        pcp_manager=None,
    )
    output: Any = SimpleNamespace(
        num_scheduled_tokens=rows,
        total_num_scheduled_tokens=sum(rows.values()),
        scheduled_spec_decode_tokens={request: [-1] for request in canvases},
    )
    state, uniform = GPUModelRunner.gather_batch_req_state(runner, output, False)
    assert state is not None
    assert state.has_prefill
    desc = manager.dispatch(len(rows), sum(rows.values()), uniform, num_active_loras=0, max_query_len=None)
    return desc.num_tokens if desc.cg_mode == CUDAGraphMode.FULL else None


class LaysOutCanvases(LlamaConfig):
    diffusion_canvas_graphs = True


def test_graphs_of_canvases_take_any_mix_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = graphs_of(LaysOutCanvases(), monkeypatch)
    found = {rows: manager.dispatch(2, rows, None, 0, max_query_len=CANVAS) for rows in (4, 5, 12, 13, 32, 33)}
    full = {rows: desc.num_tokens for rows, desc in found.items() if desc.cg_mode == CUDAGraphMode.FULL}
    assert full == {4: 4, 5: 12, 12: 12, 13: 32, 32: 32}
    assert manager.dispatch(2, 12, None, 0, max_query_len=CANVAS + 1).cg_mode == CUDAGraphMode.NONE


def test_graphs_of_other_models_take_one_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = graphs_of(LlamaConfig(), monkeypatch)
    assert manager.dispatch(2, 12, None, 0, max_query_len=CANVAS).cg_mode == CUDAGraphMode.NONE
    assert manager.dispatch(2, 16, CANVAS, 0, max_query_len=CANVAS).num_tokens == 16
    assert graph_of(manager, {"a": 4, "b": 8}, ["a", "b"]) is None


def test_a_step_of_canvases_runs_in_a_graph_beside_the_end_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = graphs_of(LaysOutCanvases(), monkeypatch)
    assert graph_of(manager, {"a": 4, "b": 8}, ["a", "b"]) == 12
    assert graph_of(manager, {"a": 4, "b": 8}, ["a"]) is None
    assert graph_of(manager, {"a": 8}, ["a"]) == 12


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_kernel_that_a_start_compiles_is_expected(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that is compiled later is not."""
    monkeypatch.setattr(jit_monitor, "_mode", mode)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def compiled(name: str) -> bool:
        """Whether the monitor says so."""
        caplog.clear()
        try:
            jit_monitor._log_triton_jit_compile(name, {})
        except RuntimeError:
            return mode == "error"
        return "JIT compilation during inference" in caplog.text

    jit_monitor.expect(True)
    assert not compiled("kernel of a start")
    jit_monitor.expect(False)
    assert compiled(f"kernel of a request, {mode}")


# 023-validation-before-streams


def refusing_engine() -> AsyncLLM:
    def process_inputs(request_id: str, prompt: Any, params: Any, tasks: Any, **options: Any) -> None:
        assert (request_id, tasks, options["session_id"]) == ("r", ("generate",), "s")
        raise VLLMValidationError("no", parameter="max_tokens")

    engine = object.__new__(AsyncLLM)
    engine.input_processor = SimpleNamespace(process_inputs=process_inputs)
    return engine


TOKENS = {"type": "token", "prompt_token_ids": [1, 2]}


@pytest.mark.parametrize("turns", [False, True], ids=["outputs", "turns of the Responses API"])
def test_a_stream_is_refused_before_it_begins(turns: bool) -> None:
    engine = refusing_engine()

    def ask(kind: RequestOutputKind, prompt: Any = TOKENS) -> Any:
        params = SamplingParams(output_kind=kind)
        if not turns:
            return engine.generate(prompt, params, "r", session_id="s")
        serving = MagicMock(spec=OpenAIServingResponses, engine_client=engine)
        return OpenAIServingResponses._generate_with_builtin_tools(
            serving, "r", prompt, params, MagicMock(), session_id="s"
        )

    with pytest.raises(VLLMValidationError, match="no"):
        ask(RequestOutputKind.DELTA)
    if turns:
        # A response in the background is no stream, and nobody awaits its output either.
        with pytest.raises(VLLMValidationError, match="no"):
            ask(RequestOutputKind.FINAL_ONLY)
    else:
        # Others are refused when their output is awaited, which nobody does here.
        ask(RequestOutputKind.FINAL_ONLY)
    ask(RequestOutputKind.DELTA, "still to be tokenized")
