"""A user's own logits processor, of vLLM's interface for Model Runner V2."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from tests.engine.harness import engine, generate, runner_of, tokens_of
from tests.paths import CHECKPOINTS
from vllm_dllm.runtime.logits.rows import RowGroups

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

PROMPTS = [[20 + index, 41, 9, 77] for index in range(4)]


class Ban(LogitsProcessor):
    """Bans the token that ``extra_args["ban"]`` names."""

    def __init__(self, vllm_config: Any, req_states: Any):
        self.banned = torch.full((req_states.max_num_reqs,), -1, dtype=torch.int64, device=req_states.device)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("ban", 0) < 0:
            raise ValueError("ban must be a token")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        token = (sampling_params.extra_args or {}).get("ban", -1)
        self.banned[req_idx] = token
        return bool(token >= 0)

    def apply(self, logits: torch.Tensor, ctx: "LogitsContext") -> torch.Tensor:
        banned = self.banned[ctx.expanded_idx_mapping].unsqueeze(1)
        return logits.masked_fill_(torch.arange(logits.shape[1], device=logits.device) == banned, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny-sdar", {}),
        ("tiny-sdar", {"dllm_policy": "entropy"}),
        ("tiny-sdar", {"dllm_verify": "freedave"}),
        ("tiny-sdar", {"dllm_verify": "spiffy"}),
        ("tiny-sdar", {"dllm_verify": "psd"}),
        ("tiny-sdar", {"dllm_verify": "fef"}),
        ("tiny-llada", {}),
        ("tiny-llada", {"dllm_verify": "fef"}),
    ],
)
def test_a_banned_token_is_as_with_a_logit_bias_whatever_neighbours_ban(
    model: str, options: dict[str, Any], temperature: float
) -> None:
    llm = engine(CHECKPOINTS / model, dllm={"max_drafts": 16}, logits_processors=[f"{__name__}:{Ban.__name__}"])

    def params(index: int, **more: Any) -> SamplingParams:
        args = {**options, **more.pop("extra_args", {})}
        seed = index if temperature else None
        common = {"temperature": temperature, "max_tokens": 16, "ignore_eos": True, "detokenize": False, "seed": seed}
        return SamplingParams(**common, extra_args=args, **more)

    def texts(prompts: list[list[int]], each: list[SamplingParams]) -> list[list[int]]:
        return [tokens_of(output) for output in generate(llm, prompts, each)]

    free = texts(PROMPTS, [params(index) for index in range(len(PROMPTS))])
    # Every other request bans the most frequent token of its free answer.
    often = [max(tokens, key=tokens.count) for tokens in free]
    own = [params(index, extra_args={"ban": often[index]} if index % 2 else {}) for index in range(len(PROMPTS))]
    biased = [params(index, **({"logit_bias": {often[index]: -1e9}} if index % 2 else {})) for index in range(4)]
    got = texts(PROMPTS, own)
    assert got == texts(PROMPTS, biased)
    assert got[::2] == free[::2]
    assert not any(often[index] in got[index] for index in range(1, len(PROMPTS), 2))
    assert texts(PROMPTS[1:2], own[1:2]) == got[1:2]


def test_what_the_processor_refuses_is_the_requests_error_alone() -> None:
    llm = engine(CHECKPOINTS / "tiny-sdar", dllm={"max_drafts": 16}, logits_processors=[f"{__name__}:{Ban.__name__}"])
    with pytest.raises((ValueError, VLLMValidationError), match="ban must be a token"):
        generate(llm, PROMPTS[:1], SamplingParams(extra_args={"ban": -1}))
    (output,) = generate(llm, PROMPTS[:1], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False))
    assert len(tokens_of(output)) == 4


@pytest.mark.parametrize("returned", [None, torch.zeros(1, 2048)])
def test_a_processor_that_returns_something_else_is_named(returned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(CHECKPOINTS / "tiny-sdar", dllm={"max_drafts": 16}, logits_processors=[f"{__name__}:{Ban.__name__}"])
    reader = runner_of(llm).sampler.reader
    monkeypatch.setattr(Ban, "apply", lambda *_: returned)
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    rows = RowGroups(torch.zeros(4, 2048), np.zeros(1, dtype=np.int64), zeros[:, 0], zeros, zeros, zeros, zeros[:, 0])
    with pytest.raises(TypeError, match=r"logits processor Ban returned .*, not logits torch.Size\(\[4, 2048\]\)"):
        reader.process(rows)
