"""The text that a request with ``dllm_infill`` filled in."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_dllm.decoding.holes import Holes

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


@dataclass(frozen=True)
class Filled:
    """A text whose masks are filled in. Ends of the text in a hole, and what stands behind them there, are left out.

    Attributes:
        text: all of it, without special tokens.
        token_ids: all of it.
        holes: token ids of each hole, in the order of the text.
    """

    text: str
    token_ids: list[int]
    holes: list[list[int]]


def filled(llm: "LLM", output: "RequestOutput", index: int = 0) -> Filled:
    """The text of an answer to a request with ``dllm_infill``.

    Args:
        llm: gave the ``output``.
        index: of the answer, where the request asked for several.

    Raises:
        ValueError: the prompt has no mask to fill in.
    """
    model_config, answer = llm.llm_engine.vllm_config.model_config, output.outputs[index]
    prompt, mask = output.prompt_token_ids or [], model_config.hf_config.mask_token_id
    masks = np.flatnonzero(np.asarray(prompt) == mask)
    if not len(masks):
        raise ValueError(f"the prompt of request {output.request_id} has no mask token to fill in")
    holes = Holes.of(masks)
    # One mask may stand for many.
    runs = ((holes.runs[0][0], len(answer.token_ids)),) if len(masks) == 1 else holes.runs
    ends = _ends(llm) | ({answer.stop_reason} if isinstance(answer.stop_reason, int) else set())
    parts = Holes(runs).cut(answer.token_ids, ends)
    token_ids, end = [], 0
    for (start, length), part in zip(holes.runs, parts, strict=True):
        token_ids += [*prompt[end:start], *part]
        end = start + length
    token_ids += prompt[end:]
    return Filled(llm.get_tokenizer().decode(token_ids, skip_special_tokens=True), token_ids, parts)


def _ends(llm: "LLM") -> frozenset[int]:
    """Tokens that end a text of the model."""
    ids = llm.llm_engine.vllm_config.model_config.try_get_generation_config().get("eos_token_id", [])
    own = llm.get_tokenizer().eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids) | ({own} if own is not None else set())
