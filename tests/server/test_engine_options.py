"""Options of ``vllm serve`` that say how the model decodes."""

import sys
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests import warm
from tests.engine.harness import engine
from vllm_dllm import request_stats

from .server import START_DEADLINE

pytestmark = pytest.mark.slow


def test_a_server_with_a_wrong_option_does_not_start_and_says_why(checkpoint: Path) -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)]
    options = ["--max-model-len", "64", "--additional-config", '{"dllm": {"policy": "best"}}']
    ended = warm.run([*command, *options], timeout=START_DEADLINE)
    assert ended.returncode != 0
    named = ("policy='best'", "'static'", "'threshold'", "'sequential'", "'entropy'")
    message = ended.stdout + ended.stderr
    assert [word for word in named if word not in message] == []


def test_the_canvas_length_of_vllms_diffusion_config_is_the_block_length(checkpoint: Path) -> None:
    llm = engine(checkpoint, max_model_len=128, hf_overrides={}, diffusion_config={"canvas_length": 8})
    assert llm.llm_engine.vllm_config.model_config.hf_config.block_length == 8
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        ignore_eos=True,
        detokenize=False,
        extra_args={"dllm_policy": "static", "dllm_denoising_steps": 1},
    )
    (output,) = llm.generate([{"prompt_token_ids": [20] * 16}], params, use_tqdm=False)
    assert request_stats(output).nfe == 3
