"""``--speculative-config``, online and offline: a diffusion model's engine options, an autoregressive one's drafter."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engine.harness import bundled, engine, generate, greedy, tokens_of
from tests.engine.speculators.checkpoints import write_drafter, write_target
from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.speculative import lay_under_additional_config

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ModuleNotFoundError:  # before vLLM 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm_dllm.plugin import register

register()


@pytest.fixture
def checkpoint_config(tmp_path: Path) -> str:
    """A checkpoint that has only its configuration."""
    (tmp_path / "config.json").write_text((bundled("sdar").checkpoint / "config.json").read_text())
    return str(tmp_path)


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    path.write_text("{}")
    return str(path)


@pytest.mark.parametrize(
    ("speculative_config", "options"),
    [
        ({"method": "dllm"}, {"verify": "freedave"}),
        ({"method": "dllm", "model": "freedave"}, {"verify": "freedave"}),
        ({"method": "dllm", "model": "spiffy"}, {"verify": "spiffy"}),
        ({"method": "dllm", "model": "psd", "num_speculative_tokens": 3}, {"verify": "psd", "drafts": 3}),
        ({"model": "fef", "num_speculative_tokens": 8}, {"verify": "fef", "window": 8}),
        ({"method": "dllm", "num_speculative_tokens": 0}, {"verify": "freedave", "drafts": 0}),
        ({"method": "dllm", "num_speculative_tokens": "auto"}, {"verify": "freedave", "drafts": "auto"}),
        # As vLLM finds the method of a draft model.
        ({"model": "psd"}, {"verify": "psd"}),
    ],
)
def test_it_selects_the_verifier_and_its_drafts(speculative_config: dict[str, Any], options: dict[str, Any]) -> None:
    assert lay_under_additional_config(speculative_config, None) == {"dllm": options}


def test_the_file_of_a_draft_graph_selects_spiffy_with_it(graph: str) -> None:
    assert lay_under_additional_config({"method": "dllm", "model": graph}, {}) == {
        "dllm": {"verify": "spiffy", "draft_graph": graph}
    }


def test_other_engine_options_and_those_of_others_stay(graph: str) -> None:
    given = {"else": 1, "dllm": {"policy": "static", "verify": "psd", "draft_graph": graph}}
    assert lay_under_additional_config({"method": "dllm", "model": "psd", "num_speculative_tokens": 5}, given) == {
        "else": 1,
        "dllm": {"policy": "static", "verify": "psd", "draft_graph": graph, "drafts": 5},
    }
    assert given == {"else": 1, "dllm": {"policy": "static", "verify": "psd", "draft_graph": graph}}


@pytest.mark.parametrize(
    ("speculative_config", "message"),
    [
        ({"method": "ngram"}, r"speculative_config method='ngram' is not allowed: allowed: 'dllm'"),
        (
            {"method": "freedave"},
            r"method='freedave' is not allowed: .*; write {\"method\": \"dllm\", \"model\": \"freedave\"}",
        ),
        (
            {"method": "dllm", "model": "eagle"},
            r"speculative_config model='eagle' is not allowed: "
            r"neither a verifier \(freedave, spiffy, psd, fef, linear_spec, isd, s2d2\) nor the file of a draft graph",
        ),
        ({}, r'speculative_config=\{\} is not allowed: it chooses nothing; give \{"method": "dllm"'),
        ({"method": "dllm", "model": "none"}, r"model='none' is not allowed"),
        ({"method": "dllm", "model": "/tmp"}, r"model='/tmp' is not allowed"),
        ({"method": "dllm", "model": 3}, r"model=3 is not allowed"),
        (
            {"method": "dllm", "num_speculative_tokens": 65},
            r"speculative_config num_speculative_tokens=65 is not allowed: input should be less than or equal to 64",
        ),
        ({"method": "dllm", "num_speculative_tokens": True}, r"num_speculative_tokens=True is not allowed: it is no"),
        ({"method": "dllm", "num_speculative_tokens": -1}, r"num_speculative_tokens=-1 is not allowed: .* equal to 0"),
        (
            {"method": "dllm", "draft_tensor_parallel_size": 2},
            r"unknown speculative_config 'draft_tensor_parallel_size'; allowed: method, model, num_speculative_tokens",
        ),
    ],
)
def test_wrong_keys_and_values_are_named_with_what_is_allowed(speculative_config: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        lay_under_additional_config(speculative_config, {})


@pytest.mark.parametrize(
    ("speculative_config", "dllm", "message"),
    [
        (
            {"model": "psd"},
            {"verify": "freedave"},
            r"asks for verify='psd' and additional_config\['dllm'\] for verify='freedave'; give one of them",
        ),
        ({"model": "psd", "num_speculative_tokens": 3}, {"drafts": 5}, r"drafts=3 and .* for drafts=5"),
        ({"method": "dllm"}, {"verify": "none"}, r"verify='freedave' and .* for verify='none'"),
    ],
)
def test_it_may_not_contradict_additional_config(
    speculative_config: dict[str, Any], dllm: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        lay_under_additional_config(speculative_config, {"dllm": dllm})


def serve_arguments(*words: str) -> argparse.Namespace:
    """What ``vllm serve`` makes of its command line."""
    parser = make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(["--skip-tokenizer-init", "--enforce-eager", *words])


def resolved_options(arguments: EngineArgs) -> dict[str, Any]:
    config = arguments.create_engine_config()
    # The rows of a diffusion model's step are not the draft tokens of vLLM's speculative decoding.
    assert config.speculative_config is None
    return {key: config.additional_config["dllm"].get(key) for key in ("verify", "drafts", "draft_graph")}


PSD = {"verify": "psd", "drafts": 3, "draft_graph": None}
FREEDAVE = {"verify": "freedave", "drafts": None, "draft_graph": None}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--speculative-config", '{"method": "dllm", "model": "psd", "num_speculative_tokens": 3}'], PSD),
        (["--speculative-config", "dllm", "--spec-model", "psd", "--spec-tokens", "3"], PSD),
        (["--spec-method", "dllm", "--spec-model", "psd", "--spec-tokens", "3"], PSD),
        (["--speculative-config.method", "dllm", "--speculative-config.model", "psd", "--spec-tokens", "3"], PSD),
        (["--speculative-config", "dllm"], FREEDAVE),
        (["-sc", "dllm"], FREEDAVE),
        (["--spec-method", "dllm"], FREEDAVE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_selects_the_verifier(
    words: list[str], options: dict[str, Any], checkpoint_config: str
) -> None:
    arguments = serve_arguments("--model", checkpoint_config, *words)
    # Every API server puts the configuration together anew.
    for _ in range(2):
        assert resolved_options(AsyncEngineArgs.from_cli_args(arguments)) == options


def test_the_arguments_it_was_given_stay_as_they_were(checkpoint_config: str) -> None:
    speculative, additional = {"method": "dllm"}, {"dllm": {"threshold": 0.5}}
    arguments = EngineArgs(
        checkpoint_config,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        spec_model="psd",
        additional_config=additional,
    )
    resolved_options(arguments)
    assert speculative == {"method": "dllm"}
    assert additional == {"dllm": {"threshold": 0.5}}


def test_a_wrong_value_stops_the_start(checkpoint_config: str) -> None:
    arguments = serve_arguments("--model", checkpoint_config, "--speculative-config", "dllm", "--spec-model", "eagle")
    with pytest.raises(OptionError, match="speculative_config model='eagle' is not allowed"):
        AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An autoregressive target, under the name of one whose drafter is known, and that drafter beside it."""
    folder = tmp_path_factory.mktemp("pair")
    return str(write_target(folder / "tiny-qwen2")), str(write_drafter(folder / "tiny-deer", "causal"))


DRAFTER_JSON = '{"method": "dllm", "model": "DRAFTER", "num_speculative_tokens": 4, "draft_cache": "recompute"}'


@pytest.mark.parametrize(
    ("words", "num_drafts", "draft_cache"),
    [
        (["--speculative-config", DRAFTER_JSON], 4, "recompute"),
        (["-sc", "dllm", "--spec-model", "DRAFTER", "--spec-tokens", "4"], 4, "keep"),
        (["--spec-method", "dllm", "--spec-model", "DRAFTER"], 16, "keep"),
        (["--speculative-config.method", "dllm", "--speculative-config.draft_cache", "recompute"], 16, "recompute"),
        # The drafter that is known for the target.
        (["--speculative-config", "dllm"], 16, "keep"),
        (["--speculative-config", '{"method": "dllm"}'], 16, "keep"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_gives_an_autoregressive_target_a_drafter(
    words: list[str], num_drafts: int, draft_cache: str, pair: tuple[str, str]
) -> None:
    its_target, drafter = pair
    arguments = serve_arguments("--model", its_target, *(word.replace("DRAFTER", drafter) for word in words))
    for _ in range(2):
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        speculative = config.speculative_config
        assert speculative.draft_model_config.model == drafter
        assert speculative.num_speculative_tokens == num_drafts
        # The rejection test knows the distributions that drafts come from.
        assert speculative.draft_sample_method == "probabilistic"
        assert speculative.draft_model_config.hf_config.drafter_options["draft_cache"] == draft_cache
        assert config.scheduler_config.scheduler_cls == "vllm_dllm.speculators.scheduler.create_scheduler"
        # Masks and separator, and the token that the target has just sampled.
        assert config.num_lookahead_tokens == num_drafts + 2
        assert speculative.max_num_new_slots_for_drafting == num_drafts + 2
        # Nothing of this is an option of a diffusion target.
        assert "dllm" not in (config.additional_config or {})


def test_an_offline_engine_takes_the_same_shorthand(pair: tuple[str, str]) -> None:
    its_target, drafter = pair
    arguments = EngineArgs(its_target, skip_tokenizer_init=True, speculative_config="dllm")
    assert arguments.create_engine_config().speculative_config.draft_model_config.model == drafter


def test_a_drafters_quantization_is_checked_by_name(pair: tuple[str, str]) -> None:
    drafter = {"method": "dllm", "model": pair[1], "quantization": "compressed-tensors"}
    arguments = EngineArgs(pair[0], skip_tokenizer_init=True, speculative_config=drafter)
    with pytest.raises(
        ValueError, match=r"quantization='compressed-tensors' is not allowed: config.json of .*tiny-deer"
    ):
        arguments.create_engine_config()


@pytest.mark.parametrize("speculative_config", [None, "dllm"], ids=["plain", "with a drafter"])
def test_options_of_a_diffusion_engine_stop_the_start_of_an_autoregressive_one(
    speculative_config: str | None, pair: tuple[str, str]
) -> None:
    arguments = EngineArgs(
        pair[0],
        skip_tokenizer_init=True,
        speculative_config=speculative_config,
        additional_config={"dllm": {"threshold": 0.9}},
    )
    with pytest.raises(ValueError, match=r"additional_config\['dllm'\] is for other models: Qwen2ForCausalLM does not"):
        arguments.create_engine_config()


@pytest.mark.parametrize(
    ("speculative_config", "message"),
    [
        ({"method": "dllm"}, r"speculative_config needs a model: no drafter is known for .*other.* Known: .*Qwen3-8B"),
        ({"method": "dllm", "model": "psd"}, r"model='psd' of speculative_config is a verifier, for diffusion models"),
        ({"method": "dllm", "window": 3}, r"unknown speculative_config 'window'; allowed: .*draft_cache"),
        ({"method": "dlm"}, r"'dlm' is not implemented by Qwen2ForCausalLM\. Allowed: ngram, .*, dllm$"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_an_autoregressive_target_cannot_do_stops_the_start(
    speculative_config: dict[str, Any], message: str, pair: tuple[str, str], tmp_path: Path
) -> None:
    its_target = tmp_path / "other"
    its_target.symlink_to(pair[0])
    arguments = EngineArgs(str(its_target), skip_tokenizer_init=True, speculative_config=speculative_config)
    with pytest.raises(ValueError, match=message):
        arguments.create_engine_config()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speculative_config", "options"),
    [({"method": "dllm", "model": "psd", "num_speculative_tokens": 2}, {**PSD, "drafts": 2}), ("dllm", FREEDAVE)],
    ids=["psd", "shorthand"],
)
def test_an_offline_engine_has_the_options(speculative_config: dict[str, Any] | str, options: dict[str, Any]) -> None:
    llm = engine(bundled("sdar").checkpoint, speculative_config=speculative_config, max_num_seqs=4)
    config = llm.llm_engine.vllm_config
    assert config.speculative_config is None
    assert {key: config.additional_config["dllm"].get(key) for key in options} == options
    # vLLM refuses these where it speculates itself.
    params = greedy(max_tokens=9, min_p=0.1, logit_bias={3: 1.0})
    assert len(tokens_of(generate(llm, [[1, 2, 3]], params)[0])) == 9


def test_linear_spec_has_no_number_of_drafts() -> None:
    assert lay_under_additional_config({"model": "linear_spec"}, None) == {"dllm": {"verify": "linear_spec"}}
    with pytest.raises(OptionError, match="num_speculative_tokens=4 is not allowed with model='linear_spec'"):
        lay_under_additional_config({"model": "linear_spec", "num_speculative_tokens": 4}, None)
