"""Options of ours at a place where nobody reads them are refused, with the place where they belong."""

from pathlib import Path
from typing import Any

import pytest

from vllm_dllm.options.errors import MisplacedOptionError, OptionError
from vllm_dllm.options.schema import DecodingOptions, DllmConfig, parse_engine_options, parse_request_options
from vllm_dllm.options.speculative import lay_under_additional_config


@pytest.mark.parametrize("name", DecodingOptions.model_fields)
def test_a_request_option_without_its_prefix_is_refused(name: str) -> None:
    with pytest.raises(MisplacedOptionError, match=rf"{name}=1 is not read without its prefix; write dllm_{name}$"):
        parse_request_options({name: 1})


@pytest.mark.parametrize(
    "key",
    [
        *DllmConfig.model_fields,
        "dllm_threshold",
        "dlm",
        "dllms",
        "DLLM",
        "vllm_dllm",
        "vllm-dllm",
        "dllm_options",
        "dllm-config",
    ],
)
def test_an_engine_option_beside_its_key_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match=rf"additional_config\['{key}'\] is not read: .* under the key \"dllm\""):
        parse_engine_options({key: 0.5})


@pytest.mark.parametrize(
    "key",
    [
        "dllm",
        "vllm_dllm",
        "dllm-threshold",
        "DLLM_THRESHOLD",
        "dlm_threshold",
        "vllm_dllm_threshold",
        " dllm_policy",
        "--dllm-policy",
        "dllmPolicy",
        "dllm:policy",
        "vllm_xargs.dllm_policy",
    ],
)
def test_a_key_of_a_request_that_is_nearly_right_is_refused(key: str) -> None:
    with pytest.raises(MisplacedOptionError, match=rf"{key}=0.5 is not read: .* begin with 'dllm_'"):
        parse_request_options({key: 0.5})


@pytest.mark.parametrize(
    "key", ["ascend", "scheduler_config", "else", "diffusion", "llm_config", "llm_steps", "vllm_omni", 3]
)
def test_what_others_read_is_left_to_them(key: Any) -> None:
    assert parse_engine_options({key: {"threshold": 0.5}, "dllm": {"radius": 1}}).radius == 1
    assert parse_request_options({key: 1, "dllm_radius": 1}).radius == 1


def test_a_draft_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    reason = "a diffusion model drafts for itself.* a forward more per round"
    with pytest.raises(OptionError, match=f"engine option draft_model='other' is not allowed: {reason}"):
        parse_engine_options({"dllm": {"verify": "fef", "draft_model": "other"}})
    with pytest.raises(OptionError, match=f"request option dllm_draft_model='other' is not allowed: {reason}"):
        parse_request_options({"dllm_draft_model": "other"})
    with pytest.raises(OptionError, match=f"model='{tmp_path}' is not allowed: {reason}"):
        lay_under_additional_config({"method": "dllm", "model": str(tmp_path)}, None)
