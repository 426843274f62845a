"""The engine's configuration for block-diffusion models: what vLLM asks of us while it puts its own together.

vLLM calls the hook first thing in ``VllmConfig.__post_init__``, once, in the process that starts the engine;
the other processes get the result. `create_scheduler` catches up on what vLLM decides later than that.
"""

import math
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.config.compilation import CUDAGraphMode
from vllm.config.diffusion import DiffusionConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_dllm.cpu.threads import bind_ranks
from vllm_dllm.decoding.draft_graph import DraftGraph, default_graph, fingerprint, load_graph
from vllm_dllm.models.configs import BlockDiffusionConfig
from vllm_dllm.options.schema import (
    DEFAULT_GENERATION_WINDOW,
    ENGINE_KEY,
    DecodingOptions,
    DllmConfig,
    has_room_for_guidance,
    parse_engine_options,
    resolve,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.interface import SchedulerInterface

# Below vllm's namespace, or its log configuration drops the messages.
logger = init_logger("vllm.vllm_dllm.models.hook")


def engine_options(vllm_config: "VllmConfig") -> DllmConfig:
    """The engine's options, in any process. The hook leaves block and sub-block length resolved in them.

    Raises:
        OptionError: names the key, its value and what is allowed.
    """
    return parse_engine_options(vllm_config.additional_config)


class BlockDiffusionModelConfig(VerifyAndUpdateConfig):
    """The hook, for the architectures of all families."""

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Validate the options, resolve the block length and fit pages, batch and context to it.

        Raises:
            ValueError: something cannot work; the message names the option and its value.
        """
        hf_config = vllm_config.model_config.hf_config
        if vllm_config.model_config.runner_type == "draft":
            # vLLM loads a drafter under the engine's configuration, which is the target's.
            return
        if not isinstance(hf_config, BlockDiffusionConfig):
            raise ValueError(
                f"{vllm_config.model_config.architecture} cannot run on a configuration of "
                f"model_type={hf_config.model_type!r}; set the model_type of its family in config.json"
            )
        _refuse_what_does_not_work_yet(vllm_config, hf_config.traits.family)
        options = _resolve(vllm_config, hf_config)
        block_length = options.block_length
        assert block_length is not None
        _check_mask_token(hf_config)

        hf_config.block_length = block_length
        hf_config.max_drafts = options.max_drafts or 0
        if options.eager:
            # The drafts' reach, behind a block that is finished but not committed yet.
            hf_config.window_blocks = 1 + math.ceil((hf_config.max_drafts + 1) / block_length)
        if hf_config.traits.attention == "full":
            options = _fit_full_attention(vllm_config, hf_config, options)
        hf_config.engine_options = options.model_dump(exclude_none=True)
        draft_graph_of(options, hf_config)  # a wrong one is an error at start
        vllm_config.additional_config = {
            **vllm_config.additional_config,
            ENGINE_KEY: hf_config.engine_options,
        }
        vllm_config.diffusion_config = DiffusionConfig(
            canvas_length=hf_config.canvas_length, max_denoising_steps=options.denoising_steps
        )
        if hf_config.traits.attention == "full":
            _fit_pages(vllm_config, 1, small=hf_config.max_drafts > 0)
        elif hf_config.traits.attention == "causal-context":
            # K/V of a finished block depends on nothing after it, so pages may end anywhere.
            _fit_pages(vllm_config, 1, small=hf_config.max_drafts > 0)
            _fit_positions(hf_config, vllm_config.model_config.max_model_len)
            _choose_backend(vllm_config)
        else:
            _fit_pages(vllm_config, block_length, small=hf_config.max_drafts > 0)
            _fit_context(vllm_config, block_length)
        _check_batch(vllm_config, block_length, hf_config.canvas_length)
        if current_platform.is_cpu():
            bind_ranks(vllm_config.parallel_config)
        # Keeps backends out that only do causal attention, and puts FlashAttention before FlashInfer.
        vllm_config.attention_config.use_non_causal = True
        compilation = vllm_config.compilation_config
        if not current_platform.is_cpu() and compilation.cudagraph_mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE):
            # Attention stays outside of the graphs. Said here, before backends size their buffers for full graphs.
            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = f"{__name__}.{create_scheduler.__name__}"
        else:
            _check_scheduler(scheduler.scheduler_cls)


def _fit_full_attention(vllm_config: "VllmConfig", hf_config: BlockDiffusionConfig, options: DllmConfig) -> DllmConfig:
    """Resolve cache and generation window, and turn off what a text that is computed anew has no use for.

    Raises:
        ValueError: the window cannot work.
    """
    model, scheduler, family = vllm_config.model_config, vllm_config.scheduler_config, hf_config.traits.family
    length = hf_config.block_length
    assert length is not None
    if options.eager:
        raise ValueError(
            f"eager=True is not allowed: the blocks after the current one are part of the text of {family} models, and "
            "their K/V is computed anew when they begin"
        )
    cache = options.cache or "dual"
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    longest_text = hf_config.longest_text(model.max_model_len)
    longest_window = min(budget - 1, longest_text) // length * length
    if not longest_window:
        raise ValueError(f"block_length={length} does not fit in max_num_batched_tokens={budget}")
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < min(budget, longest_text):
        raise ValueError(
            f"long_prefill_token_threshold={threshold} is not allowed: {family} models compute a text whole, up to "
            f"{min(budget, longest_text)} tokens, and vLLM would never let them; leave it out"
        )
    window = options.generation_window
    if window is not None and window % length:
        raise ValueError(f"generation_window={window} is not a multiple of block_length={length}")
    if window is not None and window > longest_window:
        logger.warning(
            "Lowering generation_window from %d to %d: max_model_len=%d and max_num_batched_tokens=%d leave no room "
            "for more",
            window,
            longest_window,
            model.max_model_len,
            budget,
        )
    window = min(window or max(DEFAULT_GENERATION_WINDOW // length, 1) * length, longest_window)
    hf_config.branch_rows = {"dual": length, "prefix": window, "none": longest_text}[cache]
    # Beyond vLLM's draft rows a step has those of the text that is known.
    refresh_rows = window + hf_config.max_drafts * hf_config.branch_rows
    guidance = has_room_for_guidance(options)
    if guidance:
        # The text once more, what is known of it too.
        refresh_rows = max(refresh_rows, min(longest_text, budget // 2) + window)
    hf_config.refresh_rows = min(refresh_rows, budget - 1)
    if hf_config.refresh_rows > model.max_model_len - 2:
        # vLLM warms up with a prompt of one token more than a request's draft rows.
        vllm_config.kernel_config.enable_jit_warmup = False
    hf_config.max_rows, hf_config.max_model_len = budget, model.max_model_len
    _fit_positions(hf_config, model.max_model_len)
    if vllm_config.cache_config.enable_prefix_caching:
        # Said by vLLM's default as a rule, not by the user.
        vllm_config.cache_config.enable_prefix_caching = False
    scheduler.async_scheduling = False
    if longest_text > budget:
        logger.warning(
            "Requests whose prompt and max_tokens exceed max_num_batched_tokens=%d are refused (max_model_len=%d)",
            budget,
            model.max_model_len,
        )
    logger.info(
        "%s models see the whole text, masks included: no prefix caching, no chunked prefill (a prompt and its window "
        "are computed together, so both must fit in max_num_batched_tokens=%d) and no asynchronous scheduling",
        family,
        budget,
    )
    return options.model_copy(update={"cache": cache, "generation_window": window, "guidance": guidance})


def _fit_positions(hf_config: BlockDiffusionConfig, max_model_len: int) -> None:
    """The last block, which begins where the prompt and the blocks before it end, may reach beyond max_model_len."""
    longest_text = hf_config.longest_text(max_model_len)
    rope = hf_config.rope_parameters
    if (rope or {}).get("rope_type", "default") == "default":
        hf_config.max_position_embeddings = max(hf_config.max_position_embeddings, longest_text)


def _choose_backend(vllm_config: "VllmConfig") -> None:
    """Have an attention backend that is told of every group of rows whether it is causal."""
    attention = vllm_config.attention_config
    if current_platform.is_cuda() and attention.backend is None and not current_platform.has_device_capability(90):
        # FlashAttention can from version 4 on, which vLLM takes for diffusion models from Hopper on.
        attention.backend = AttentionBackendEnum.TRITON_ATTN


def draft_graph_of(options: DllmConfig, hf_config: BlockDiffusionConfig) -> DraftGraph | None:
    """The graph that an engine drafts from: the user's, or the one that ships for the model family.

    Raises:
        ValueError: it cannot be read, or was calibrated for another model.
    """
    if not options.max_drafts:
        return None
    if options.draft_graph is None:
        return default_graph(hf_config.traits.family)
    assert hf_config.block_length is not None
    return load_graph(
        options.draft_graph,
        family=hf_config.traits.family,
        block_length=hf_config.block_length,
        fingerprint=fingerprint(hf_config),
    )


def create_scheduler(vllm_config: "VllmConfig", **kwargs: Any) -> "SchedulerInterface":
    """What vLLM finds under ``scheduler_cls`` and calls in the engine's process, like the class it expects.

    Two things can only be settled here, because vLLM goes on with its configuration after the hook. It
    decides on asynchronous scheduling, which the platform may take back. And it refuses metrics per request
    that are on without a ``speculative_config``, though the scheduler, their only reader, has them.
    """
    from vllm_dllm.runtime.parent import end_with_parent
    from vllm_dllm.runtime.scheduling.full import FullAttentionScheduler
    from vllm_dllm.runtime.scheduling.scheduler import DllmAsyncScheduler, DllmScheduler

    end_with_parent()
    observability = vllm_config.observability_config
    if observability.per_request_spec_decode_metrics == "none":
        # What a request cost travels to the front end in these metrics.
        observability.per_request_spec_decode_metrics = "summary"
    scheduler = DllmAsyncScheduler if vllm_config.scheduler_config.async_scheduling else DllmScheduler
    if vllm_config.model_config.hf_config.traits.attention == "full":
        scheduler = FullAttentionScheduler
    return scheduler(vllm_config=vllm_config, **kwargs)


def _check_scheduler(scheduler_cls: str | type) -> None:
    from vllm_dllm.runtime.scheduling.scheduler import DllmScheduler

    cls = resolve_obj_by_qualname(scheduler_cls) if isinstance(scheduler_cls, str) else scheduler_cls
    if cls is not create_scheduler and not (isinstance(cls, type) and issubclass(cls, DllmScheduler)):
        raise ValueError(
            f"scheduler_cls={scheduler_cls!r} does not know the rows of a block; derive it from "
            "vllm_dllm.runtime.scheduling.scheduler.DllmScheduler or DllmAsyncScheduler"
        )


def _refuse_what_does_not_work_yet(vllm_config: "VllmConfig", family: str) -> None:
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    unsupported = {
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        "decode context parallelism (--decode-context-parallel-size)": (parallel.decode_context_parallel_size > 1),
        "prefill context parallelism (--prefill-context-parallel-size)": (parallel.prefill_context_parallel_size > 1),
        "dual batch overlap (--enable-dbo)": parallel.enable_dbo,
        "speculative decoding (--speculative-config)": vllm_config.speculative_config is not None,
        "LoRA adapters (--enable-lora)": vllm_config.lora_config is not None,
        "KV transfer (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        "KV offloading (--kv-offloading-size)": cache.kv_offloading_size is not None,
        "fast prefill (--kv-sharing-fast-prefill)": cache.kv_sharing_fast_prefill,
        "pooling (--runner pooling)": model.runner_type != "generate",
        "embeddings for prompts (--enable-prompt-embeds)": model.enable_prompt_embeds,
        "--logprobs-mode other than raw_logprobs": model.logprobs_mode != "raw_logprobs",
        # vLLM has no collective that gathers experts' rows of several engines there.
        "experts and data parallelism (--data-parallel-size) on a CPU": model.is_moe
        and parallel.data_parallel_size > 1
        and current_platform.is_cpu(),
        # The worker's integer per request that vLLM counts NaNs in carries something else here.
        "VLLM_RAISE_ON_LOGIT_NANS=1": envs.VLLM_RAISE_ON_LOGIT_NANS,
        # Their buffers hold a batch of requests; the row plan makes several requests of one.
        "--attention-backend FLASHINFER or FLEX_ATTENTION": vllm_config.attention_config.backend
        in (AttentionBackendEnum.FLASHINFER, AttentionBackendEnum.FLEX_ATTENTION),
    }
    asked = [feature for feature, is_on in unsupported.items() if is_on]
    if asked:
        raise ValueError(f"{family} models do not work with {', '.join(asked)} in vllm-dllm; leave it out")


def _resolve(vllm_config: "VllmConfig", hf_config: BlockDiffusionConfig) -> DllmConfig:
    """Lay the engine options over vLLM's ``--diffusion-config``, and those over the model's configuration."""
    options = engine_options(vllm_config)
    given = options.model_dump(exclude_none=True)
    if (diffusion := vllm_config.diffusion_config) is not None:
        # To the user the canvas is what one denoises, a block; the rows of a step are our business.
        if diffusion.canvas_length is not None:
            given.setdefault("block_length", diffusion.canvas_length)
        if diffusion.max_denoising_steps is not None and options.tokens_per_step is None:
            given.setdefault("denoising_steps", diffusion.max_denoising_steps)
    given.setdefault("block_length", hf_config.block_length)
    if hf_config.traits.sub_block_length is not None:
        given.setdefault("sub_block_length", hf_config.traits.sub_block_length)
    if hf_config.traits.shifted and given.get("eager"):
        raise ValueError(
            f"eager=True is not allowed: the first token of a block of {hf_config.traits.family} models is only known "
            "once the block before it is committed"
        )
    if hf_config.traits.attention != "full":
        for name in ("cache", "generation_window", "refresh_interval", "guidance"):
            if name in given:
                raise ValueError(
                    f"{name}={given[name]!r} is not allowed: blocks of {hf_config.traits.family} models do not see "
                    "what comes after them, so K/V stays as it is (it is an option of models with full attention)"
                )
    if given.get("eager") and given.get("sub_block_length"):
        raise ValueError("eager=True and sub_block_length exclude each other; leave one of them out")
    unlimited = parse_engine_options({ENGINE_KEY: given})
    assert unlimited.block_length is not None
    # Wrong defaults are an error at start, not one of every request that sets nothing.
    defaults = resolve(DecodingOptions(), unlimited, hf_config.traits, unlimited.block_length)
    if unlimited.max_drafts is None:
        # Room for what they ask for.
        given["max_drafts"] = defaults.num_drafts
    resolved = parse_engine_options({ENGINE_KEY: given})
    assert resolved.block_length is not None
    if resolved.sub_block_length is not None and resolved.block_length % resolved.sub_block_length:
        raise ValueError(
            f"sub_block_length={resolved.sub_block_length} does not divide block_length={resolved.block_length}"
        )
    return resolved


def _check_mask_token(hf_config: BlockDiffusionConfig) -> None:
    mask = hf_config.mask_token_id
    if not isinstance(mask, int) or not 0 <= mask < hf_config.vocab_size:
        raise ValueError(
            f"mask_token_id={mask!r} is not a token of the model, which has {hf_config.vocab_size}; "
            """set it with --hf-overrides '{"mask_token_id": N}'"""
        )


def _fit_pages(vllm_config: "VllmConfig", block_length: int, *, small: bool) -> None:
    """Make KV pages hold whole diffusion blocks.

    The K/V of a position depends on its whole block: requests may share a page only if they share its blocks.

    Args:
        small: as few as can be, because every draft has pages of its own.
    """
    cache = vllm_config.cache_config
    if cache.user_specified_block_size:
        if cache.block_size % block_length:
            raise ValueError(
                f"--block-size {cache.block_size} (the page of the KV cache) is not a multiple of the "
                f"diffusion block_length={block_length}"
            )
    else:
        # vLLM settles its default later (128 on CPU, elsewhere the attention backend's choice, a multiple of
        # 16), unless the size counts as the user's. Kernels take multiples of `unit`.
        default, unit = (128, 32) if current_platform.is_cpu() else (16, 16)
        if default % block_length or (small and default > math.lcm(unit, block_length)):
            cache.block_size = math.lcm(unit, block_length)
            cache.user_specified_block_size = True
    if cache.prefix_match_unit is not None and cache.prefix_match_unit % block_length:
        raise ValueError(
            f"--prefix-match-unit {cache.prefix_match_unit} is not a multiple of the diffusion "
            f"block_length={block_length}"
        )


def _check_batch(vllm_config: "VllmConfig", block_length: int, canvas_length: int) -> None:
    """Check that a step has room for a request's rows, and say how many requests it has room for."""
    scheduler = vllm_config.scheduler_config
    batched = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    # vLLM warms up with a prompt of one token more than a request's rows.
    if batched <= canvas_length:
        raise ValueError(
            f"max_num_batched_tokens={batched} must be more than the {canvas_length} rows that one request takes "
            f"in a step (block_length={block_length})"
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < canvas_length:
        raise ValueError(
            f"long_prefill_token_threshold={threshold} is less than the {canvas_length} rows that one request takes "
            f"in a step (block_length={block_length}), and vLLM applies it to those too"
        )
    if scheduler.max_num_seqs * block_length > batched:
        logger.info(
            "Up to %d of %d requests denoise in one step (max_num_batched_tokens=%d, block_length=%d)",
            batched // block_length,
            scheduler.max_num_seqs,
            batched,
            block_length,
        )


def _fit_context(vllm_config: "VllmConfig", block_length: int) -> None:
    """Keep whole blocks within the model's positions: the last one is decoded whole and then cut."""
    model = vllm_config.model_config
    positions = _num_positions(model.hf_config)
    longest = positions // block_length * block_length
    if not longest:
        raise ValueError(f"block_length={block_length} exceeds the {positions} positions of the model")
    if model.max_model_len > longest:
        logger.warning(
            "Lowering max_model_len from %d to %d: whole blocks of %d must fit in the model's %d positions",
            model.max_model_len,
            longest,
            block_length,
            positions,
        )
        model.max_model_len = longest


def _num_positions(hf_config: BlockDiffusionConfig) -> int:
    """Positions in the rotary table that vLLM builds for the model."""
    rope = hf_config.rope_parameters
    factor = rope.get("factor") or 1
    if rope["rope_type"] == "yarn":
        return int(rope["original_max_position_embeddings"] * factor)
    if rope["rope_type"] in ("linear", "dynamic"):
        return int(hf_config.max_position_embeddings * factor)
    return hf_config.max_position_embeddings
