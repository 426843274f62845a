"""What a drafter's drafts are worth, measured by the engine."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from vllm_dllm.plugin import model_types
from vllm_dllm.training.answers import model_runner_v2


class Acceptance(NamedTuple):
    """Speculation over several prompts.

    Attributes:
        tokens: of all answers.
        prompts: how many; each has a prefill, which gives the first token.
        histogram: rounds by how many drafts they accepted.
    """

    tokens: int
    prompts: int
    histogram: Counter[int]

    @property
    def rounds(self) -> int:
        """Verifications of drafts."""
        return sum(self.histogram.values())

    @property
    def accepted(self) -> float:
        """Mean accepted drafts per round, tau without the target's own token."""
        return sum(count * rounds for count, rounds in self.histogram.items()) / max(self.rounds, 1)

    @property
    def target_forwards_per_token(self) -> float:
        """Prefills included; plain decoding takes 1."""
        return (self.prompts + self.rounds) / max(self.tokens, 1)


def method_of(drafter: str) -> str:
    """vLLM's word for the way that a model drafts.

    Args:
        drafter: a folder, or a name of the hub.
    """
    config, _ = PreTrainedConfig.get_config_dict(drafter)
    # A drafter in the layout of autoregressive models states a mask.
    diffuses = config.get("model_type") in model_types() or config.get("mask_token_id") is not None
    return "dllm" if diffuses else "draft_model"


@model_runner_v2()
def speculate(
    target: str, drafter: str, k: int, questions: Sequence[str], *, max_tokens: int, temperature: float, **engine: Any
) -> Acceptance:
    """Let the target answer user messages, with ``k`` drafts per round of a diffusion drafter or a smaller model.

    Args:
        engine: further arguments of ``vllm.LLM``; ``speculative_config`` may hold further keys.
    """
    from vllm import LLM, SamplingParams

    speculative = {
        **engine.pop("speculative_config", {}),
        "method": method_of(drafter),
        "model": drafter,
        "num_speculative_tokens": k,
    }
    llm = LLM(target, speculative_config=speculative, per_request_spec_decode_metrics="summary", **engine)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0 if temperature else None)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    llm.llm_engine.engine_core.shutdown()
    histogram: Counter[int] = Counter()
    for output in outputs:
        metrics = output.outputs[0].spec_decode_metrics
        if metrics is not None:
            histogram.update(dict(enumerate(metrics.histogram)))
    return Acceptance(sum(len(output.outputs[0].token_ids) for output in outputs), len(outputs), +histogram)


def parse_engine(text: str) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` as JSON.

    Raises:
        ValueError: the text is no JSON object.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--engine is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--engine={text} must be a JSON object")
    return values
