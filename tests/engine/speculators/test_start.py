"""What cannot work is refused when the engine starts, and the message says what to change."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache

from tests.engine.harness import generate, greedy, tokens_of
from tests.engine.speculators.checkpoints import MASK, SEP, VOCAB, write_drafter, write_target
from tests.engine.speculators.engines import (
    DEFAULTS,
    drafted,
    drafter,
    engine_of,
    plain_engine,
    reference_drafter,
    target,
)
from vllm_dllm.models import drafter as drafters
from vllm_dllm.models.parsers import DrafterConfigParser
from vllm_dllm.plugin import register
from vllm_dllm.speculators.vocabulary import VocabularyError, draft_ids_of

register()


def configure(
    model: Path | str | None, *, of: Path | None = None, engine: dict[str, Any] | None = None, **asked: Any
) -> VllmConfig:
    """The engine's configuration, without an engine."""
    speculative = {"method": "dllm", "num_speculative_tokens": 4, **asked}
    if model is not None:
        speculative["model"] = str(model)
    args = {**DEFAULTS, **(engine or {})}
    del args["disable_log_stats"]
    # vLLM reads every folder that it cannot read a second time, two seconds later.
    with mock.patch("vllm.transformers_utils.repo_utils.time"):
        return EngineArgs(str(of or target()), speculative_config=speculative, **args).create_engine_config()


def refuse_to_start(model: Path, message: str, engine: dict[str, Any], **speculative: Any) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(model, speculative=speculative, **engine)


TOKENS = {"<|endoftext|>": 0, **{f"t{index}": index for index in range(1, 40)}}


def write_tokenizer(folder: Path, tokens: dict[str, int]) -> None:
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token=next(iter(tokens))))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_a_drafter_is_configured() -> None:
    config = configure(drafter("causal"))
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 4
    assert speculative.draft_model_config.architecture == "OpenDCoderModel"
    assert config.model_config.architecture == "Qwen2ForCausalLM"
    # The drafter's context is capped by the target's.
    assert speculative.draft_model_config.max_model_len == DEFAULTS["max_model_len"]
    assert (draft_ids_of(speculative) < 0).nonzero().squeeze(1).tolist() == [MASK, SEP]


# The model.


def test_no_model_for_a_target_without_a_known_drafter() -> None:
    with pytest.raises(
        ValueError, match=r"needs a model: no drafter is known for .*target-48\. Known: fredzzp/open-dcoder"
    ):
        configure(None)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A target whose drafter is known."""
    shutil.copytree(target(), tmp_path / "tiny-qwen2")
    return tmp_path / "tiny-qwen2"


def test_the_known_drafter_lies_beside_its_target(beside: Path) -> None:
    write_drafter(beside.parent / drafters.KNOWN_DRAFTERS[beside.name], "causal")
    config = configure(None, of=beside)
    assert config.speculative_config.model == str(beside.parent / "tiny-deer")
    for shorthand in ("dllm", {"method": "dllm"}):
        args = {key: value for key, value in DEFAULTS.items() if key != "disable_log_stats"}
        config = EngineArgs(str(beside), speculative_config=shorthand, **args).create_engine_config()
        assert config.speculative_config.model == str(beside.parent / "tiny-deer")
        assert config.speculative_config.num_speculative_tokens == 16


def test_the_known_drafter_is_missing(beside: Path) -> None:
    with pytest.raises((ValueError, OSError), match="tiny-deer"):
        configure(None, of=beside)


def test_the_papers_targets_have_known_drafters() -> None:
    for name in ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B"):
        assert drafters.KNOWN_DRAFTERS[name].count("/") == 1


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match="nowhere"):
        configure(tmp_path / "nowhere")


def test_a_drafter_that_is_no_diffusion_model(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"cannot draft: LlamaForCausalLM is no diffusion model"):
        configure(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2", "PanguEmbedded"])
def test_an_autoregressive_drafter_in_the_layout_of_a_diffusion_model(model_type: str, tmp_path: Path) -> None:
    write_target(tmp_path / "other", seed=1)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    family = {"qwen2": "open_dcoder", "PanguEmbedded": "pangu_diffusion"}[model_type]
    message = (
        rf"other cannot draft: it is an autoregressive model \(model_type='{model_type}', no mask_token_id in "
        rf'config.json, no mask_token in tokenizer_config.json\).* "config_format": "{family}" to speculative_config'
    )
    with pytest.raises(ValueError, match=message):
        configure(tmp_path / "other")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_diffusion_drafter_in_an_autoregressive_layout_has_a_mask_token(file: str, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "other", seed=1)
    write_tokenizer(folder, TOKENS)
    mask = {"config.json": {"mask_token_id": MASK}, "tokenizer_config.json": {"mask_token": "t39"}}[file]
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **mask}))
    _, config = DrafterConfigParser().parse(folder, False)
    assert config.traits.family == "Open-dCoder"


def test_the_user_may_say_what_a_drafter_is(tmp_path: Path) -> None:
    """Its mask is then the family's, which this small model does not have."""
    with pytest.raises(ValueError, match=r"mask_token_id=151665 of .*other is not one of its 48 tokens"):
        configure(write_target(tmp_path / "other", seed=1), config_format="open_dcoder")


def test_a_published_drafter_is_known_for_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mask_token_id=151665 of .*open-dcoder-0.5B is not one of its 48 tokens"):
        configure(write_target(tmp_path / "open-dcoder-0.5B", seed=1))


@pytest.mark.parametrize("name", ["freedave", "psd", "spiffy", "fef"])
def test_a_verifier_as_the_model(name: str) -> None:
    with pytest.raises(ValueError, match=f"model='{name}' of speculative_config is a verifier, for diffusion models"):
        configure(name)


# Vocabularies.


def with_tokenizers(folder: Path, target_tokens: dict[str, int], draft_tokens: dict[str, int]) -> tuple[Path, Path]:
    shutil.copytree(target(), folder / "target")
    shutil.copytree(drafter("causal"), folder / "drafter")
    write_tokenizer(folder / "target", target_tokens)
    write_tokenizer(folder / "drafter", draft_tokens)
    return folder / "target", folder / "drafter"


def test_another_tokenizer(tmp_path: Path) -> None:
    ours, theirs = with_tokenizers(tmp_path, TOKENS, {f"u{index}": index for index in range(40)})
    with pytest.raises(
        VocabularyError, match=r"drafter cannot draft for .*target: .*another tokenizer .* 4\d of 4\d ids differ"
    ):
        configure(theirs, of=ours)


def test_the_same_tokenizer(tmp_path: Path) -> None:
    ours, theirs = with_tokenizers(tmp_path, TOKENS, TOKENS)
    draft_ids = draft_ids_of(configure(theirs, of=ours).speculative_config)
    assert (draft_ids < 0).nonzero().squeeze(1).tolist() == [MASK, SEP]


def test_embeddings_of_another_width() -> None:
    with pytest.raises(VocabularyError, match="embeddings for 64 tokens and the target for 48; a vocab_mapping"):
        configure(drafter("causal", vocab=64))


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    """Of a drafter of 64 tokens, whose ids are the target's backwards."""
    path = tmp_path / "mapping.json"
    path.write_text(json.dumps({str(63 - index): index for index in range(VOCAB)}))
    return path


def test_embeddings_of_another_width_with_a_mapping(mapping: Path) -> None:
    config = configure(drafter("causal", vocab=64), vocab_mapping=str(mapping))
    draft_ids = draft_ids_of(config.speculative_config)
    # Ids 62 and 63 are the drafter's own.
    assert draft_ids.tolist() == [-1, -1, *range(61, 15, -1)]


def test_texts_are_the_targets_with_a_mapping(mapping: Path) -> None:
    llm = engine_of(drafter("causal", vocab=64), speculative={"vocab_mapping": str(mapping)})
    prompts = [[0, 1, 2], list(range(40))]
    with drafted(llm) as seen:
        mine = generate(llm, prompts, greedy(max_tokens=12))
    expected = generate(plain_engine(), prompts, greedy(max_tokens=12))
    assert [tokens_of(output) for output in mine] == [tokens_of(output) for output in expected]
    backwards = replace(reference_drafter("causal", 4, vocab=64), missing=())
    for round_ in seen:
        distributions = backwards.logits([63 - token if token >= 2 else 0 for token in round_.text])
        distributions = distributions[:, [63 - token for token in range(VOCAB)]]
        distributions[:, :2] = -torch.inf
        torch.testing.assert_close(round_.distributions, distributions, atol=1e-4, rtol=0)


def test_a_mapping_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"vocab_mapping='.*none.json' cannot be read: No such file"):
        configure(drafter("causal"), vocab_mapping=str(tmp_path / "none.json"))


@pytest.mark.parametrize("key", ["mask_token_id", "sep_token_id"])
@pytest.mark.parametrize("value", [VOCAB, -1, "[MASK]"])
def test_own_ids_that_are_none(key: str, value: object) -> None:
    model = drafter("causal", **{key: value})
    with pytest.raises(ValueError, match=rf"{key}={value!r} of .* is not one of its 48 tokens".replace("[", r"\[")):
        configure(model)


# Keys and values.


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is not allowed"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 is not allowed"),
        ({"num_speculative_tokens": 129}, "num_speculative_tokens=129 is not allowed"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens='many' is not allowed"),
        ({"draft_cache": "forget"}, "draft_cache='forget' is not allowed: allowed: 'keep' or 'recompute'"),
        ({"draft_sample_method": "beam"}, "draft_sample_method='beam' is not allowed"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method='block' is not allowed"),
        ({"config_format": "qwen2"}, "config_format='qwen2' is not allowed"),
        ({"adaptive": "perhaps"}, "adaptive='perhaps' is not allowed"),
        ({"draft_temperature_factor": 0}, "draft_temperature_factor=0 is not allowed"),
        (
            {"draft_temperature_factor": 0.5, "draft_sample_method": "greedy"},
            "draft_temperature_factor=0.5 is read with draft_sample_method='probabilistic' alone",
        ),
        ({"draft_tokens": 3}, r"draft_tokens.*allowed"),
    ],
)
def test_wrong_keys_and_values(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(drafter("causal"), **asked)


def test_more_drafts_than_the_context_has_room_for() -> None:
    with pytest.raises(
        ValueError, match="num_speculative_tokens=32 of speculative_config must be below max_model_len=32"
    ):
        configure(drafter("causal"), num_speculative_tokens=32, engine={"max_model_len": 32})


def test_a_context_that_is_none(tmp_path: Path) -> None:
    message = "context_attention='sideways' is not supported for Open-dCoder models; allowed: 'full', 'causal'"
    with pytest.raises(ValueError, match=message):
        configure(write_drafter(tmp_path / "drafter", "sideways"))


# The engine around it.


@pytest.mark.parametrize(
    ("engine", "feature"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
    ],
)
def test_what_a_drafter_does_not_work_with(engine: dict[str, Any], feature: str) -> None:
    with pytest.raises(ValueError, match=f"diffusion drafter does not work with .*{feature}"):
        configure(drafter("causal"), engine=engine)


@pytest.mark.parametrize(
    ("cache", "rows", "message"),
    [
        ("keep", 10, r"max_num_batched_tokens=10 must be at least 11, the rows of one request with num_speculative_to"),
        ("recompute", 64, r"max_num_batched_tokens=64 must be at least 198, the rows of a text of max_model_len=192"),
    ],
)
def test_a_batch_without_room_for_a_request_and_its_drafts(cache: str, rows: int, message: str) -> None:
    rows_and_requests = {"max_num_batched_tokens": rows, "max_num_seqs": 2}
    refuse_to_start(drafter("causal"), message, rows_and_requests, draft_cache=cache)


def test_the_smallest_batch_with_room() -> None:
    llm = engine_of(drafter("causal"), max_num_batched_tokens=11, max_num_seqs=2)
    mine, expected = (generate(e, [[3, 4, 5] * 5, [6]], greedy(max_tokens=9)) for e in (llm, plain_engine()))
    assert [tokens_of(output) for output in mine] == [tokens_of(output) for output in expected]


def test_the_older_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    disable_envs_cache()
    with pytest.raises(ValueError, match=r"does not work with the older model runner \(VLLM_USE_V2_MODEL_RUNNER=0\)"):
        configure(drafter("causal"))


def test_pages_that_are_no_multiple_of_the_blocks() -> None:
    message = r"KV pages of \[32\] tokens are no multiple of its diffusion block_length=12; set --block-size"
    refuse_to_start(drafter("block-causal", block_length=12), message, {})


@pytest.mark.slow
def test_an_engine_with_the_batch_of_a_server_starts_compiled() -> None:
    """vLLM measures it with more requests than have room for all their drafts."""
    options = {"enforce_eager": False, "max_num_seqs": 128, "max_num_batched_tokens": 2048}
    llm = engine_of(drafter("causal"), speculative={"num_speculative_tokens": 16}, **options)
    assert tokens_of(generate(llm, [[5, 6, 7]], greedy(max_tokens=8))[0]) == tokens_of(
        generate(plain_engine(), [[5, 6, 7]], greedy(max_tokens=8))[0]
    )


# FailFast.


FAILFAST = {"draft_length": "failfast"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"draft_length": "short"}, r"draft_length='short' is not allowed: allowed: 'fixed' or 'failfast'"),
        (
            {"draft_length_step": 5},
            r"draft_length_step=5 is read with draft_length='failfast' alone, and .* is 'fixed'",
        ),
        ({**FAILFAST, "adaptive": True}, "adaptive=True is not allowed with draft_length='failfast'"),
        (
            {**FAILFAST, "draft_length_threshold": 1.5},
            "draft_length_threshold=1.5 is not allowed: .* less than or equal to 1",
        ),
        ({**FAILFAST, "draft_length_max": 0}, "draft_length_max=0 is not allowed: .* greater than or equal to 1"),
        ({**FAILFAST, "draft_length_start": 5}, "draft_length_start=5 must be at most num_speculative_tokens=4"),
        (
            {**FAILFAST, "draft_length_start": 3, "draft_length_max": 2},
            "draft_length_start=3 must be at most draft_length_max=2",
        ),
        ({**FAILFAST, "draft_length_step": True}, "draft_length_step=True is not allowed: it is no number"),
        (
            {**FAILFAST, "draft_length_start": 2, "sub_block_length": 3},
            "sub_block_length=3 must divide .* block_length=8",
        ),
    ],
    ids=lambda value: str(value),
)
def test_options_of_failfast_that_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(drafter("block-causal"), **asked)


@pytest.mark.parametrize("key", ["sub_block_length", "unmask_threshold", "draft_forwards"])
def test_options_of_blocks_are_refused_for_a_drafter_without_blocks(key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}=1(\.0)? is for drafters with diffusion blocks"):
        configure(drafter("causal"), draft_length="failfast", draft_length_start=2, **{key: 1})


@pytest.mark.parametrize(("context", "longest"), [("causal", 60), ("block-causal", 70)])
def test_the_longest_draft_has_room(context: str, longest: int) -> None:
    """With blocks, the first position of each has no confidence that counts towards the maximum."""
    speculative = {"method": "dllm", "model": str(drafter(context)), "draft_length": "failfast"}
    args = {**DEFAULTS, "max_num_batched_tokens": 1024}
    del args["disable_log_stats"]
    config = EngineArgs(str(target()), speculative_config=speculative, **args).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == longest


def test_the_heads_of_target_and_drafter_may_have_other_dtypes() -> None:
    """``--hf-overrides`` are the target's alone."""
    options = {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}}
    prompts, params = [[5, 6, 7], [8, 9]], greedy(max_tokens=8)
    llm = engine_of(drafter("causal"), speculative={"draft_sample_method": "probabilistic"}, **options)
    drawn = generate(llm, prompts, greedy(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True))
    assert [len(tokens_of(output)) for output in drawn] == [8, 8]
    got, expected = (generate(each, prompts, params) for each in (llm, plain_engine(**options)))
    assert [tokens_of(output) for output in got] == [tokens_of(output) for output in expected]
