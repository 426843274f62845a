"""The engine's configuration with a diffusion model that drafts for an autoregressive target (DEER)."""

import copy
from pathlib import Path
from typing import Any, Literal

import vllm.envs as envs
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.platforms import current_platform

from vllm_dllm.cpu.threads import bind_ranks
from vllm_dllm.decoding.failfast import longest_draft
from vllm_dllm.models.configs import BlockDiffusionConfig
from vllm_dllm.models.limits import limit_default_for_draft_logits
from vllm_dllm.models.parsers import DrafterConfigParser
from vllm_dllm.models.quantization import check_method
from vllm_dllm.observe.vllm_log import module_logger
from vllm_dllm.options.drafter import (
    BLOCK_KEYS,
    FAILFAST_KEYS,
    MOST_DRAFT_TOKENS,
    DrafterChoices,
    DrafterConfig,
    DrafterOptions,
)
from vllm_dllm.options.errors import OptionError, parse_options
from vllm_dllm.options.speculative import DRAFT_VERIFIERS
from vllm_dllm.speculators.vocabulary import VocabularyError, mapped_ids, mask_and_separator, share_vocabulary

logger = module_logger(__name__)

KNOWN_DRAFTERS = {
    "Qwen3-4B": "fredzzp/open-dcoder-0.5B",
    "Qwen3-8B": "fredzzp/open-dcoder-0.5B",
    "Qwen3-14B": "fredzzp/open-dcoder-0.5B",
    "Qwen3-30B-A3B": "fredzzp/open-dcoder-0.5B",
    "tiny-qwen2": "tiny-deer",
}
"""Drafter of a target, by the last part of the target's name: a model of the hub, or a folder beside the target's
folder. The paper's own drafters are not published; their authors made them from Open-dCoder."""

KNOWN_FORMATS: dict[str, Literal["open_dcoder"]] = {"open-dcoder-0.5B": "open_dcoder"}
"""``config_format`` of published drafters whose ``config.json`` is that of an autoregressive model, by the last part of
the drafter's name."""


def create_speculative_config(
    asked: dict[str, Any], target: ModelConfig, parallel: ParallelConfig
) -> SpeculativeConfig:
    """vLLM's configuration for a diffusion drafter: a draft model that brings a speculator of its own.

    Raises:
        OptionError: a key or value of ``speculative_config`` is wrong; names it and what is allowed.
        ValueError: drafter and target do not go together.
    """
    given = parse_options(DrafterConfig, asked, "", "speculative_config")
    model = given.model or _known_drafter(target)
    if model in DRAFT_VERIFIERS:
        raise OptionError(
            f"model={model!r} of speculative_config is a verifier, for diffusion models; {target.model} is "
            "autoregressive and needs a diffusion model that drafts for it"
        )
    _refuse_what_does_not_work(target, parallel)
    if current_platform.is_cpu():
        bind_ranks(parallel)
    _refuse_what_nothing_reads(given)
    _refuse_too_many_drafts(given.num_speculative_tokens, target)
    # vLLM reads the drafter's configuration in the format of the target's.
    reading = copy.copy(target)
    known_format = KNOWN_FORMATS.get(Path(model).name)
    reading.config_format = given.config_format or known_format or DrafterConfigParser.config_format
    ours = {*DrafterChoices.model_fields, "method", "model", "config_format"}
    try:
        config = SpeculativeConfig(
            method="draft_model",
            model=model,
            target_model_config=reading,
            target_parallel_config=parallel,
            **given.model_dump(exclude=ours, exclude_none=True),
        )
    except OSError as error:
        raise OptionError(
            f"model={model!r} of speculative_config, the drafter of {target.model}, is neither a folder with a model "
            f"nor a model of the hub that can be read: {error}"
        ) from error
    config.target_model_config = target
    drafter = config.draft_model_config
    hf_config = drafter.hf_config
    if not isinstance(hf_config, BlockDiffusionConfig):
        raise ValueError(f"{model} cannot draft: {drafter.architecture} is no diffusion model that vllm-dllm knows")
    if hf_config.traits.causal_blocks:
        raise ValueError(
            f"{model} cannot draft: {hf_config.traits.family} models draft for themselves, in the forwards that "
            "verify; serve the model itself"
        )
    check_method(drafter)
    if drafter.is_moe and parallel.data_parallel_size > 1:
        raise ValueError(f"{model} cannot draft with --data-parallel-size: it has experts; leave one of them out")
    _check_own_tokens(hf_config, model)
    if given.draft_length == "failfast":
        _fit_failfast(given, config)
        _refuse_too_many_drafts(config.num_speculative_tokens, target)
    hf_config.drafter_options = _with_missing_ids(given.options, config, target).model_dump()
    if given.draft_sample_method == "probabilistic":
        limit_default_for_draft_logits(target, config.num_speculative_tokens, drafter.head_dtype)
    limit = drafter.max_model_len
    if limit < target.max_model_len:
        logger.warning(
            "The drafter's context is %d tokens and the target's max_model_len is %d: texts get no drafts beyond %d",
            limit,
            target.max_model_len,
            limit,
        )
    return config


def _known_drafter(target: ModelConfig) -> str:
    """The drafter that `KNOWN_DRAFTERS` has for a target."""
    name = Path(target.model).name
    drafter = KNOWN_DRAFTERS.get(name)
    if drafter is None:
        raise OptionError(
            f"speculative_config needs a model: no drafter is known for {target.model}. Known: "
            + ", ".join(f"{known} for {name}" for name, known in KNOWN_DRAFTERS.items())
        )
    if "/" not in drafter:
        drafter = str(Path(target.model).parent / drafter)
    logger.info("Taking %s as the drafter of %s", drafter, target.model)
    return drafter


def _refuse_what_does_not_work(target: ModelConfig, parallel: ParallelConfig) -> None:
    unsupported = {
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        "decode context parallelism (--decode-context-parallel-size)": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism (--prefill-context-parallel-size)": parallel.prefill_context_parallel_size > 1,
        "pooling (--runner pooling)": target.runner_type != "generate",
        "the older model runner (VLLM_USE_V2_MODEL_RUNNER=0)": envs.VLLM_USE_V2_MODEL_RUNNER is False,
    }
    asked = [feature for feature, is_on in unsupported.items() if is_on]
    if asked:
        raise ValueError(f"A diffusion drafter does not work with {', '.join(asked)}; leave it out")


def _refuse_too_many_drafts(number: int, target: ModelConfig) -> None:
    if number >= target.max_model_len:
        raise OptionError(
            f"num_speculative_tokens={number} of speculative_config must be below max_model_len={target.max_model_len}",
        )


def _refuse_what_nothing_reads(given: DrafterConfig) -> None:
    """Keys of one way to draw drafts, or to choose their number, beside another way."""
    factor = given.draft_temperature_factor
    if given.draft_sample_method == "greedy" and factor != 1:
        raise OptionError(
            f"speculative_config draft_temperature_factor={factor!r} is read with draft_sample_method='probabilistic' "
            "alone: greedy drafts are not drawn"
        )
    if given.draft_length == "failfast":
        if given.adaptive:
            raise OptionError(
                "speculative_config adaptive=True is not allowed with draft_length='failfast': both say how many "
                "drafts are verified; leave one of them out"
            )
        return
    for key in FAILFAST_KEYS:
        if key in given.model_fields_set:
            value = getattr(given, key)
            raise OptionError(
                f"speculative_config {key}={value!r} is read with draft_length='failfast' alone, and draft_length is "
                f"{given.draft_length!r}"
            )


def _fit_failfast(given: DrafterConfig, config: SpeculativeConfig) -> None:
    """Check FailFast's numbers against the drafter, and have room for the longest draft unless told otherwise."""
    hf_config = config.draft_model_config.hf_config
    has_blocks = hf_config.traits.attention == "block-causal"
    length = hf_config.block_length if has_blocks else None
    if length is None:
        for key in BLOCK_KEYS:
            if key in given.model_fields_set:
                value = getattr(given, key)
                raise OptionError(
                    f"speculative_config {key}={value!r} is for drafters with diffusion blocks; {given.model} makes "
                    "all drafts in one forward"
                )
    elif given.sub_block_length is not None and length % given.sub_block_length:
        raise OptionError(
            f"speculative_config sub_block_length={given.sub_block_length} must divide the drafter's diffusion "
            f"block_length={length}"
        )
    if given.draft_length_start > given.draft_length_max:
        raise OptionError(
            f"speculative_config draft_length_start={given.draft_length_start} must be at most "
            f"draft_length_max={given.draft_length_max}"
        )
    if "num_speculative_tokens" not in given.model_fields_set:
        longest = longest_draft(given.draft_length_start, given.draft_length_step, given.draft_length_max, length)
        config.num_speculative_tokens = min(longest, MOST_DRAFT_TOKENS)
    elif given.num_speculative_tokens < given.draft_length_start:
        raise OptionError(
            f"speculative_config draft_length_start={given.draft_length_start} must be at most "
            f"num_speculative_tokens={given.num_speculative_tokens}"
        )


def _check_own_tokens(hf_config: BlockDiffusionConfig, model: str) -> None:
    for key in ("mask_token_id", "sep_token_id"):
        index = getattr(hf_config, key)
        if index is not None and not (type(index) is int and 0 <= index < hf_config.vocab_size):
            raise ValueError(f"{key}={index!r} of {model} is not one of its {hf_config.vocab_size} tokens")


def _tokens(name: str, revision: str | None, *, trust_remote_code: bool) -> dict[str, int] | None:
    """Ids of a tokenizer's tokens; ``None``: there is no tokenizer."""
    from vllm.tokenizers import get_tokenizer

    try:
        return get_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code).get_vocab()
    except (OSError, ValueError):
        return None


def _with_missing_ids(options: DrafterOptions, config: SpeculativeConfig, target: ModelConfig) -> DrafterOptions:
    """Compare the vocabularies of drafter and target, once for all workers."""
    drafter = config.draft_model_config
    hf_config = drafter.hf_config
    if options.vocab_mapping is not None:
        mapped_ids(options.vocab_mapping, hf_config, target)
        return options
    tokens = [
        _tokens(name, revision, trust_remote_code=target.trust_remote_code)
        for name, revision in ((target.tokenizer, target.tokenizer_revision), (drafter.model, config.revision))
    ]
    if None in tokens:
        logger.warning(
            "There is no tokenizer of both %s and %s: their ids are taken to be the same", target.model, drafter.model
        )
    try:
        draft_ids = share_vocabulary(
            *tokens,
            num_target_ids=target.get_vocab_size(),
            num_draft_ids=drafter.get_vocab_size(),
            own_ids=mask_and_separator(hf_config),
        )
    except VocabularyError as error:
        raise VocabularyError(f"{drafter.model} cannot draft for {target.model}: {error}") from None
    missing = (draft_ids < 0).nonzero().squeeze(1).tolist()
    logger.info("%d of %d tokens are not shared and never drafted", len(missing), len(draft_ids))
    return options.model_copy(update={"missing_ids": tuple(missing)})
