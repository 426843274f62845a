"""Fitting an engine to its model: rows, K/V pages, context and attention backend.

Each function takes vLLM's configuration while vLLM puts it together, and may change that configuration. What the
functions find out stands in the `vllm_dllm.geometry.Geometry` that they return.
"""

import math
from dataclasses import replace

from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from vllm_dllm.geometry import Geometry
from vllm_dllm.models.configs import BlockDiffusionConfig
from vllm_dllm.models.limits import limit_default_of_max_num_seqs
from vllm_dllm.models.quantization import cache_dtype
from vllm_dllm.observe.vllm_log import module_logger
from vllm_dllm.options.resolve import drafts_beside_block
from vllm_dllm.options.schema import DllmConfig
from vllm_dllm.runtime.backends import choose_backend

logger = module_logger(__name__)

DEFAULT_GENERATION_WINDOW = 1024

SHORT_BLOCK = 4
"""Blocks so short leave no room for FreeDave's drafts, unless windows hold several of them."""


def fit_engine(vllm_config: VllmConfig, options: DllmConfig) -> Geometry:
    """Fit rows, pages and context to the model, and say what the engine is.

    Args:
        options: the engine's own, block length and room for drafts resolved.

    Raises:
        ValueError: something cannot work; the message names the option and its value.
    """
    hf_config: BlockDiffusionConfig = vllm_config.model_config.hf_config
    mask = hf_config.mask_token_id
    if type(mask) is not int or not 0 <= mask < hf_config.vocab_size:
        raise ValueError(
            f"mask_token_id={mask!r} is not a token of the model, which has {hf_config.vocab_size}; set it with "
            f"""--hf-overrides '{{"mask_token_id": N}}', N from 0 to {hf_config.vocab_size - 1}"""
        )
    assert options.block_length is not None
    scheduler = vllm_config.scheduler_config
    if (scheduler.max_num_scheduled_tokens or 0) > scheduler.max_num_batched_tokens:
        # vLLM gives a step the smaller of the two.
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
    fit = _fit_whole_text if hf_config.traits.sees_whole_text else _fit_committed_blocks
    geometry = fit(vllm_config, hf_config, options, options.block_length)
    limit_default_of_max_num_seqs(vllm_config, geometry)
    _check_batch(vllm_config, geometry)
    attention = vllm_config.attention_config
    attention.backend = choose_backend(
        attention.backend, attention, cache_dtype(vllm_config), masks_differ=geometry.masks_differ
    )
    kernels = vllm_config.kernel_config
    if kernels.enable_jit_warmup and geometry.longest_warm_up > geometry.max_model_len:
        # vLLM's tables of texts and K/V pages have room for no longer request.
        logger.info(
            "No warm-up of kernels, the first requests compile them: requests of vLLM's warm-up may come to %d tokens "
            "(%d rows of a step, block_length=%d), and max_model_len=%d",
            geometry.longest_warm_up,
            geometry.canvas_length,
            geometry.block_length,
            geometry.max_model_len,
        )
        kernels.enable_jit_warmup = False
    return geometry


def _fit_committed_blocks(
    vllm_config: VllmConfig, hf_config: BlockDiffusionConfig, options: DllmConfig, length: int
) -> Geometry:
    """Models whose finished blocks keep their K/V."""
    max_drafts = options.max_drafts or 0
    if hf_config.traits.causal_context:
        # K/V of a finished block depends on nothing after it, so pages may end anywhere.
        _fit_pages(vllm_config, 1, small=max_drafts > 0)
        _fit_positions(hf_config, vllm_config.model_config.max_model_len + length - 1)
        _fit_context(vllm_config.model_config, length, anywhere=True)
    else:
        _fit_pages(vllm_config, length, small=max_drafts > 0)
        _fit_context(vllm_config.model_config, length, anywhere=False)
    # Drafts reach beyond a block that is finished but not committed yet.
    window_blocks = 1 + math.ceil((max_drafts + 1) / length) if options.eager else 1
    if options.eager and options.eager is not True:
        window_blocks = max(window_blocks, options.eager)
    traits = hf_config.traits
    if not traits.commit_predicts and not traits.causal_context:
        _recommend_windows(options, length)
    if options.first_token == "denoised":
        traits = replace(traits, commit_predicts=False)
    return Geometry(
        traits=traits,
        options=options,
        block_length=length,
        window_blocks=window_blocks,
        max_drafts=max_drafts,
        step_rows=step_rows(vllm_config),
        rows_option=_rows_option(vllm_config),
        max_model_len=vllm_config.model_config.max_model_len,
        draft_rows=window_blocks * length,
    )


def _recommend_windows(options: DllmConfig, length: int) -> None:
    """Recommend ``eager`` to a user who asks for more FreeDave drafts than a short block has room for."""
    asked = drafts_beside_block("freedave", options.drafts if isinstance(options.drafts, int) else None)
    room = max(length - 2, 0)
    if options.verify == "freedave" and options.eager is None and length <= SHORT_BLOCK and asked > room:
        logger.info(
            "Blocks of %d have room for %d of %d drafts. Where few requests run at a time, the engine option "
            "eager=True lets drafts reach into the next blocks; eager=False leaves this message out",
            length,
            room,
            asked,
        )


def step_rows(vllm_config: VllmConfig) -> int:
    """Rows of a step for all requests together."""
    scheduler = vllm_config.scheduler_config
    return scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens


def _rows_option(vllm_config: VllmConfig) -> str:
    """What the user sets `step_rows` with."""
    scheduler = vllm_config.scheduler_config
    return f"max_num_{'scheduled' if step_rows(vllm_config) < scheduler.max_num_batched_tokens else 'batched'}_tokens"


def _fit_whole_text(
    vllm_config: VllmConfig, hf_config: BlockDiffusionConfig, options: DllmConfig, length: int
) -> Geometry:
    """Models whose positions see the whole text: resolve cache and generation window, turn off what needs fixed K/V."""
    model_config, family, max_drafts = vllm_config.model_config, hf_config.traits.family, options.max_drafts or 0
    if options.eager:
        raise ValueError(
            f"eager=True is not allowed: the blocks after the current one are part of the text of {family} models, and "
            "their K/V is computed anew when they begin"
        )
    _fit_positions(hf_config, model_config.max_model_len + length - 1)
    _fit_context(model_config, length, anywhere=True)
    rows, max_model_len = step_rows(vllm_config), model_config.max_model_len
    longest_text = max_model_len + length - 1
    longest_window = min(rows - 1, longest_text) // length * length
    if not longest_window:
        raise ValueError(f"{_rows_option(vllm_config)}={rows} must be more than block_length={length}")
    window = options.generation_window or max(DEFAULT_GENERATION_WINDOW // length, 1) * length
    if window % length:
        raise ValueError(f"generation_window={window} is not a multiple of block_length={length}")
    if options.generation_window and window > longest_window:
        logger.warning(
            "Lowering generation_window from %d to %d: max_model_len=%d and %s=%d leave no room for more",
            window,
            longest_window,
            max_model_len,
            _rows_option(vllm_config),
            rows,
        )
    window = min(window, longest_window)
    cache = options.cache or "dual"
    draft_rows = {"dual": length, "prefix": window, "none": longest_text}[cache]
    # Beyond vLLM's draft rows a step has those of the text that is known.
    refresh_rows = window + max_drafts * draft_rows
    guidance = options.has_room_for_guidance
    if guidance:
        # The text once more, what is known of it too.
        refresh_rows = max(refresh_rows, min(longest_text, rows // 2) + window)
    refresh_rows = min(refresh_rows, rows - 1)
    _turn_off_what_needs_fixed_kv(vllm_config, family, longest_text)
    _fit_pages(vllm_config, 1, small=max_drafts > 0)
    return Geometry(
        traits=hf_config.traits,
        options=options.model_copy(update={"cache": cache, "generation_window": window, "guidance": guidance}),
        block_length=length,
        max_drafts=max_drafts,
        step_rows=rows,
        rows_option=_rows_option(vllm_config),
        max_model_len=max_model_len,
        draft_rows=draft_rows,
        refresh_rows=refresh_rows,
    )


def _turn_off_what_needs_fixed_kv(vllm_config: VllmConfig, family: str, longest_text: int) -> None:
    """Prefix caching, chunked prefill and asynchronous scheduling count on K/V that stay as they are."""
    scheduler, rows = vllm_config.scheduler_config, step_rows(vllm_config)
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < min(rows, longest_text):
        raise ValueError(
            f"long_prefill_token_threshold={threshold} is not allowed: {family} models compute a text whole, up to "
            f"{min(rows, longest_text)} tokens, and vLLM would never let them; leave it out"
        )
    # Prefix caching is vLLM's default, so as a rule the user did not ask for it.
    vllm_config.cache_config.enable_prefix_caching = False
    scheduler.async_scheduling = False
    if longest_text > rows:
        logger.warning(
            "Requests whose prompt and max_tokens exceed %s=%d are refused (max_model_len=%d)",
            _rows_option(vllm_config),
            rows,
            vllm_config.model_config.max_model_len,
        )
    logger.info(
        "%s models see the whole text, masks included: a prompt and its window are computed together, so both must fit "
        "in %s=%d; prefix caching and asynchronous scheduling are off",
        family,
        _rows_option(vllm_config),
        rows,
    )


def _fit_pages(vllm_config: VllmConfig, block_length: int, *, small: bool) -> None:
    """Make KV pages hold whole diffusion blocks.

    The K/V of a position depends on its whole block: requests may share a page only if they share its blocks. Pages are
    ``small`` where every draft has pages of its own.
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


def _fit_positions(hf_config: BlockDiffusionConfig, longest_text: int) -> None:
    """Have the rotary table reach as far as the last block, which may end beyond max_model_len."""
    if (hf_config.rope_parameters or {}).get("rope_type", "default") == "default":
        hf_config.max_position_embeddings = max(hf_config.max_position_embeddings, longest_text)


def _fit_context(model: ModelConfig, block_length: int, *, anywhere: bool) -> None:
    """Keep whole blocks within the model's positions: the last one is decoded whole and then cut.

    Args:
        anywhere: a block may begin on any position, so the last one on the last of a text.
    """
    positions = _num_positions(model.hf_config)
    longest = positions - block_length + 1 if anywhere else positions // block_length * block_length
    if longest < 1:
        raise ValueError(f"block_length={block_length} exceeds the {positions} positions of the model")
    if model.max_model_len > longest:
        logger.warning(
            "Lowering max_model_len from %d to %d: the last block of %d may begin on the last position of a text, and "
            "must end within the model's %d positions"
            if anywhere
            else "Lowering max_model_len from %d to %d: whole blocks of %d must fit in the model's %d positions",
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
    if rope["rope_type"] == "linear":
        return int(hf_config.max_position_embeddings * factor)
    # vLLM multiplies the default of max_model_len by the factor of "dynamic" too, and not the table.
    return hf_config.max_position_embeddings


MOST_CAPTURED_ROWS = 2048
"""Rows of the largest CUDA graph. A step of more rows is bound by arithmetic, not by the host."""


def capture_sizes(block_length: int, step_rows: int) -> list[int]:
    """Rows that CUDA graphs are captured for: whole blocks, which all rows of denoising steps are.

    Steps are padded to the next size, by an eighth of their rows at most.
    """
    most, blocks, sizes = min(MOST_CAPTURED_ROWS, step_rows) // block_length, 1, []
    while blocks <= most:
        sizes.append(blocks * block_length)
        blocks += max(1, (1 << (blocks.bit_length() - 1)) // 8)
    return sizes or [step_rows]


def _check_batch(vllm_config: VllmConfig, geometry: Geometry) -> None:
    """Check that a step has room for a request's rows, and say how many requests a step has room for."""
    scheduler, rows, length = vllm_config.scheduler_config, geometry.step_rows, geometry.block_length
    because = f"block_length={length}" + (f", max_drafts={geometry.max_drafts}" if geometry.max_drafts else "")
    # vLLM warms up with a prompt of one token more than a request's rows.
    if rows <= geometry.canvas_length:
        raise ValueError(
            f"{geometry.rows_option}={rows} must be more than the {geometry.canvas_length} rows that one request "
            f"takes in a step ({because})"
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < geometry.canvas_length:
        raise ValueError(
            f"long_prefill_token_threshold={threshold} is less than the {geometry.canvas_length} rows that one request "
            f"takes in a step ({because}), and vLLM applies it to those too"
        )
    if scheduler.max_num_seqs * length > rows:
        logger.info(
            "Up to %d of %d requests denoise in one step (%s=%d, block_length=%d)",
            rows // length,
            scheduler.max_num_seqs,
            geometry.rows_option,
            rows,
            length,
        )
