"""A rollout gives a trainer what a policy gradient needs: step maps, and log-probabilities that fit them."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from vllm import RequestOutput, SamplingParams

from tests.engine.harness import engine, generate
from tests.paths import CHECKPOINTS
from vllm_dllm import request_stats
from vllm_dllm.tiny.arithmetic import make_problems
from vllm_dllm.tiny.text import render_prompt
from vllm_dllm.training.layouts import load_network, read_config
from vllm_dllm.training.trace_rl import Trajectory, rollout_log_probs, token_log_probs, training_states

MODEL = CHECKPOINTS / "tiny-sdar-json"
BLOCK = 16
TEMPERATURE = 0.8


def trajectories_of(outputs: list[RequestOutput]) -> list[Trajectory]:
    found = []
    for output in outputs:
        for each in output.outputs:
            step_map = request_stats(each).step_map
            assert step_map is not None
            assert each.logprobs is not None
            tokens = list(each.token_ids)
            assert output.prompt_token_ids is not None
            log_probs = [entry[token].logprob for token, entry in zip(tokens, each.logprobs, strict=True)]
            found.append(
                Trajectory(
                    prompt=output.prompt_token_ids,
                    tokens=tokens,
                    steps=step_map.steps,
                    log_probs=log_probs,
                    learned=len(tokens),
                )
            )
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dllm_policy": "threshold", "dllm_threshold": 0.6}, id="threshold"),
        pytest.param({"dllm_policy": "static", "dllm_tokens_per_step": 3}, id="static"),
        pytest.param({"dllm_policy": "threshold", "dllm_verify": "freedave"}, id="drafts"),
    ],
)
def test_a_trainer_computes_the_log_probabilities_of_the_engine(options: dict[str, Any]) -> None:
    """So that the step map names, for every token, the state that the token was drawn from."""
    # Without the other checkpoints' mask token.
    llm = engine(MODEL, dllm={"max_drafts": 2}, logprobs_mode="processed_logprobs", hf_overrides={})
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    mask, pad = read_config(MODEL)["mask_token_id"], tokenizer.token_to_id("<|endoftext|>")
    prompts = [tokenizer.encode(render_prompt(each.question)).ids for each in make_problems(4, 7, "train")]
    params = [
        SamplingParams(
            n=2,
            seed=3,
            temperature=TEMPERATURE,
            # To the end of a block.
            max_tokens=3 * BLOCK - len(prompt) % BLOCK,
            ignore_eos=True,
            logprobs=0,
            extra_args={**options, "dllm_step_map": True},
        )
        for prompt in prompts
    ]
    trajectories = trajectories_of(generate(llm, prompts, params))
    batch = training_states(trajectories, block_length=BLOCK, mask_token_id=mask, pad_token_id=pad)
    with torch.no_grad():
        ours = token_log_probs(load_network(MODEL), batch, mask_token_id=mask, temperature=TEMPERATURE)
    theirs = rollout_log_probs(trajectories, batch)
    assert len(theirs) == sum(len(each.tokens) for each in trajectories)
    assert theirs.min() < -0.5
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
