"""What a request that fills in masks (``dllm_infill``) may ask, decided when it is admitted."""

from dataclasses import replace
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.decoding.holes import Holes
from vllm_dllm.geometry import Geometry
from vllm_dllm.options.errors import MisplacedOptionError, OptionError, shown
from vllm_dllm.options.resolved import ResolvedOptions
from vllm_dllm.traits import FamilyTraits

_SEES_NOTHING_BEHIND = (
    "blocks of {family} models do not see the text behind them, which they would have to lead to; models with full "
    "attention (LLaDA, Dream) fill in masks"
)


def text_with_mask(prompt: str, suffix: str, tokenizer: Any, mask_token_id: int, traits: FamilyTraits) -> str:
    """``prompt`` and ``suffix`` with one mask token between them, which ``infill="max_tokens"`` is for.

    Raises:
        VLLMValidationError: the family cannot see behind a block, or the tokenizer has no text for its mask token.
    """
    if not traits.sees_whole_text:
        reason = _SEES_NOTHING_BEHIND.format(family=traits.family)
        raise VLLMValidationError(f"suffix is not supported: {reason}.", parameter="suffix", value=shown(suffix))
    mask = tokenizer.convert_ids_to_tokens([mask_token_id])[0]
    if mask is None or tokenizer.encode(mask, add_special_tokens=False) != [mask_token_id]:
        raise VLLMValidationError(
            f"suffix is not supported: the tokenizer has no text for the mask token {mask_token_id}; send a prompt of "
            "token ids with mask tokens and dllm_infill=true.",
            parameter="suffix",
            value=shown(suffix),
        )
    return f"{prompt}{mask}{suffix}"


def fill_in(
    prompt_length: int, masks: np.ndarray, params: SamplingParams, options: ResolvedOptions, geometry: Geometry
) -> ResolvedOptions:
    """``options`` with the holes of a prompt; ``max_tokens`` of ``params`` becomes the number of masks to fill in.

    Where there are several holes, no token ends the request: a token that ends a text ends its hole alone.

    Args:
        masks: [M] int64: positions of the prompt's mask tokens, in rising order.
        params: the request's own.

    Raises:
        OptionError: the family, the prompt or another parameter does not go with it.
    """
    if not geometry.traits.sees_whole_text:
        raise _refusal(options, _SEES_NOTHING_BEHIND.format(family=geometry.traits.family))
    if options.verify == "fef":
        raise _refusal(options, "it does not go with verify='fef'; freedave, spiffy and psd go with it")
    if not len(masks):
        raise _refusal(options, "the prompt has no mask token to fill in")
    assert params.max_tokens is not None
    holes = Holes.of(masks)
    num_known = prompt_length - len(masks)
    if options.infill == "max_tokens":
        if len(masks) > 1:
            raise _refusal(
                options, f"one mask token stands for max_tokens masks, and the prompt has {len(masks)}; give true"
            )
        num_masks = min(params.max_tokens, geometry.max_model_len - num_known)
        holes = Holes(((int(masks[0]), num_masks),))
    else:
        num_masks = len(masks)
    if num_known == 0:
        raise _refusal(options, "the prompt has nothing but mask tokens")
    if num_masks < 1 or num_known + num_masks > geometry.max_model_len:
        raise _refusal(
            options,
            f"{num_known} known tokens and {max(num_masks, 1)} to fill in are more than "
            f"max_model_len={geometry.max_model_len}",
        )
    if params.min_tokens > num_masks:
        raise MisplacedOptionError(
            f"min_tokens={params.min_tokens} is more than the {num_masks} masks that dllm_infill is to fill in",
            "min_tokens",
            params.min_tokens,
        )
    _check_order(holes, params, options)
    params.max_tokens = num_masks
    if len(holes.runs) > 1:
        params.ignore_eos, params._eos_token_id, params.stop_token_ids = True, None, []
    return replace(options, hole_runs=holes.runs)


def _check_order(holes: Holes, params: SamplingParams, options: ResolvedOptions) -> None:
    """Refuse parameters that read what is generated as one text, where it is several."""
    several = len(holes.runs) > 1
    structured = params.structured_outputs if options.structured else None
    asked = {"stop": params.stop, "bad_words": params.bad_words, "structured_outputs": structured}
    for name, value in asked.items():
        if value and several:
            raise MisplacedOptionError(
                f"{name} does not go with dllm_infill where a prompt has several holes, and this one has "
                f"{len(holes.runs)}: it reads what is generated as one text",
                name,
                str(value),
            )
    if params.bad_words and holes.runs[0][0] == 0:
        raise MisplacedOptionError(
            "bad_words do not go with dllm_infill where the text begins with a hole: they look at the text before it",
            "bad_words",
            str(params.bad_words),
        )


def _refusal(options: ResolvedOptions, reason: str) -> OptionError:
    return OptionError(f"infill={options.infill!r} is not allowed: {reason}", "infill", options.infill)
