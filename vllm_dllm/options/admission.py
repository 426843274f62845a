"""What a request may ask of a diffusion model, decided when it is admitted.

Every field of ``SamplingParams`` is either honoured by the sampler, has no meaning for it (how text is
returned), or is refused here, so that nothing a user asks for is silently ignored.
"""

import contextlib
from typing import Any

import msgspec
import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.options.errors import MOST_SHOWN, OptionError, shown
from vllm_dllm.options.resolve import ResolvedOptions, resolve
from vllm_dllm.options.schema import REQUEST_PREFIX, DllmConfig, parse_request_options
from vllm_dllm.runtime.plan.spans import Spans
from vllm_dllm.traits import FamilyTraits

REFUSED_FIELDS: dict[str, str] = {
    "prompt_logprobs": (
        "a diffusion model predicts masked positions from both sides, so a prompt token has no next-token "
        "distribution; `echo` together with `logprobs` asks for the same"
    ),
    "prompt_logprob_token_ids": (
        "a diffusion model predicts masked positions from both sides, so a prompt token has no next-token distribution"
    ),
    "logprob_token_ids": "ask for the most likely tokens with `logprobs` instead",
    "thinking_token_budget": (
        "a block is denoised in parallel, so the end-of-thinking token cannot be forced in its midst"
    ),
    "trace_decode_token_ids": "a replayed trace fixes one token per step, a diffusion model unmasks blocks",
}
"""Fields of ``SamplingParams`` that diffusion models cannot honour, with the reason a user is given."""

MOST_TOKENS = {"allowed_token_ids": 1024, "logit_bias": 1024}
MOST_DELAYED_STOP_TOKENS = 120
"""What vLLM's sampler has room for per request. It checks in the worker, where too many end the engine.

It has room for 128 stop tokens that ``min_tokens`` holds back; the rest is for the model's own.
"""

MOST_BAD_WORD_BYTES = 16384
"""Bad words times the longest of them. The sampler keeps a table of that shape for all requests."""

MOST_BAD_WORD_TOKENS = 64
"""Most tokens of a bad word. vLLM takes 128 words at most (``VLLM_MAX_NUM_BAD_WORDS``), and the sampler's table grows
to as many as any request had, of the longest that any had."""

SEEDS = -(2**63), 2**63 - 1
"""Range of seeds. The worker keeps them as 64-bit integers; what exceeds them would end the engine there."""

MOST_MIN_TOKENS = 1 << 30
"""Largest ``min_tokens``. The worker keeps the length that they make as a 32-bit integer."""

MOST_REPETITION_PATTERN = 256
"""Largest ``max_pattern_size``. The scheduler looks for patterns of every size behind each token, while all wait."""

MOST_LEVELS = 16
"""Most levels of lists and objects in ``extra_args``. The engine pickles them for its workers, level by level, and ends
where that fails."""

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Keys of ``extra_args`` about the caches of other engines, which diffusion models do not share."""

PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""What counts the text so far, with the value that turns it off."""

_FOREIGN_PREFIX = "diffusion_"
"""Options of vLLM's own canvas-diffusion models. Some change how many rows the scheduler hands out."""


def validate_sampling_params(
    params: SamplingParams,
    traits: FamilyTraits,
    block_length: int,
    engine_options: dict[str, Any] | None = None,
) -> None:
    """Refuse what the sampler of a diffusion model cannot honour.

    vLLM checks ranges, vocabulary bounds and structured outputs itself, before and after this.

    Args:
        params: the request's parameters, with the server's defaults already in them.
        traits: of the model family that is served.
        block_length: diffusion block length of the served model.
        engine_options: the engine's options (``vllm_dllm.options.schema.DllmConfig``), as it resolved them at start.

    Raises:
        VLLMValidationError: names the parameter, its value and why it is refused. Over HTTP it is a status
        400.
    """
    for name, reason in REFUSED_FIELDS.items():
        value = getattr(params, name)
        if value is not None:
            raise _refusal(name, value, f"{name} is not supported with diffusion models: {reason}.")
    if params.logprobs == -1:
        raise _refusal(
            "logprobs",
            params.logprobs,
            "logprobs=-1 (the whole vocabulary) is not supported with diffusion models; "
            "ask for 0 to --max-logprobs tokens.",
        )
    _validate_ranges(params)
    _validate_transport(params)
    _validate_sizes(params)
    _validate_options(params, traits, block_length, DllmConfig(**(engine_options or {})))


def validate_request(
    prompt_length: int,
    params: SamplingParams,
    traits: FamilyTraits,
    block_length: int,
    engine_options: dict[str, Any] | None,
    *,
    max_rows: int,
    max_model_len: int,
    resumable: bool = False,
) -> None:
    """Refuse a request that no step has room for, or whose steps do not fit its blocks.

    Args:
        params: the request's parameters, ``max_tokens`` included.
        engine_options: the engine's options, as it resolved them at start.
        max_rows: rows of a step (``max_num_batched_tokens``).
        max_model_len: positions of a text.
        resumable: further prompts are to follow the answer (a streaming session).

    Raises:
        VLLMValidationError: as ``validate_sampling_params``.
    """
    longest = max(map(len, params.bad_words_token_ids or ()), default=0)
    if longest > MOST_BAD_WORD_TOKENS:
        raise _refusal(
            "bad_words",
            longest,
            f"a bad word may have {MOST_BAD_WORD_TOKENS} tokens at most, and the longest has {longest}.",
        )
    if traits.attention != "full":
        return
    if resumable:
        raise _refusal(
            "resumable",
            resumable,
            f"streaming sessions are not supported with {traits.family} models: they compute a text whole, so one that "
            "goes on would have to begin anew.",
        )
    engine = DllmConfig(**(engine_options or {}))
    assert params.max_tokens is not None
    options = _validate_options(params, traits, block_length, engine, params.max_tokens)
    num_tokens = min(params.max_tokens, max_model_len - prompt_length)
    window = -(-num_tokens // block_length) * block_length
    # A refresh of the last block computes all of it, whatever the generation window.
    guided = options.cfg_scale > 0
    if (1 + guided) * (prompt_length + window) > max_rows:
        twice = f", with cfg_scale={options.cfg_scale} twice" if guided else ""
        raise _refusal(
            "max_tokens",
            params.max_tokens,
            f"a prompt of {prompt_length} tokens and {window} to be generated (max_tokens={params.max_tokens}, in "
            f"whole blocks of {block_length}) make {prompt_length + window}. {traits.family} models compute a text "
            f"whole{twice}, and a step has room for {max_rows} tokens (max_num_batched_tokens); shorten either, or "
            "raise max_num_batched_tokens.",
        )
    _check_rows_of_drafts(prompt_length, num_tokens, options, block_length, engine, max_rows)


def _check_rows_of_drafts(
    prompt_length: int,
    num_tokens: int,
    options: ResolvedOptions,
    block_length: int,
    engine: DllmConfig,
    max_rows: int,
) -> None:
    """Refuse drafts that no step has room for, where tokens depend on their number: they come all or not at all."""
    if not options.needs_all_drafts:
        return
    assert engine.cache is not None and engine.generation_window is not None
    spans = Spans(engine.cache, block_length, engine.generation_window)
    text_end = spans.text_end(prompt_length, num_tokens)
    starts = np.arange(prompt_length, text_end, block_length)
    branch_rows = int(spans.draft(starts, spans.window_end(starts, text_end)).length.max())
    num_rows = (1 + options.num_drafts) * branch_rows
    # Where K/V is kept all rows of such a step are vLLM's draft rows, of which a step has one less.
    room = max_rows if engine.cache == "none" else max_rows - 1
    if num_rows > room:
        raise _refusal(
            f"{REQUEST_PREFIX}drafts",
            options.num_drafts,
            f"{options.num_drafts} drafts and the text itself, up to {branch_rows} rows each with "
            f"cache={engine.cache!r}, make {num_rows}, and a step has room for {room} "
            f"(max_num_batched_tokens={max_rows}). With verify='psd', verify='fef' and match='subset' tokens depend on "
            "the number of drafts, so they come all or not at all; ask for fewer (dllm_drafts, dllm_window), or raise "
            "max_num_batched_tokens.",
        )


def _validate_sizes(params: SamplingParams) -> None:
    for name, most in MOST_TOKENS.items():
        size = len(getattr(params, name) or ())
        if size > most:
            raise _refusal(name, size, f"{name} may hold {most} tokens at most, not {size}.")
    words = params.bad_words or ()
    # vLLM takes each word with and without a space before it.
    size = 2 * len(words) * max((len(word.encode()) for word in words), default=0)
    if size > MOST_BAD_WORD_BYTES:
        raise _refusal(
            "bad_words",
            size,
            f"bad_words are too long: twice their number times the bytes of the longest may be {MOST_BAD_WORD_BYTES} "
            f"at most, not {size}.",
        )
    size = len(params.stop_token_ids or ())
    if params.min_tokens > 0 and size > MOST_DELAYED_STOP_TOKENS:
        raise _refusal(
            "stop_token_ids",
            size,
            f"min_tokens can hold back {MOST_DELAYED_STOP_TOKENS} stop_token_ids at most, not {size}.",
        )


def _validate_ranges(params: SamplingParams) -> None:
    """Refuse numbers and ids that vLLM would only stumble over in the engine."""
    lowest, highest = SEEDS
    # The answers of a request take its seed and those that follow it.
    if params.seed is not None and not lowest <= params.seed <= highest - (params.n - 1):
        raise _refusal(
            "seed",
            params.seed,
            f"seed={params.seed} is not allowed with n={params.n}: each answer takes the seed after that of the one "
            "before, and all must be between -2**63 and 2**63 - 1.",
        )
    if params.min_tokens > MOST_MIN_TOKENS:
        raise _refusal("min_tokens", params.min_tokens, f"min_tokens may be {MOST_MIN_TOKENS} at most.")
    repetition = params.repetition_detection
    if repetition is not None and repetition.max_pattern_size > MOST_REPETITION_PATTERN:
        raise _refusal(
            "repetition_detection",
            repetition.max_pattern_size,
            f"max_pattern_size of repetition_detection may be {MOST_REPETITION_PATTERN} at most: the scheduler looks "
            "for patterns of every size behind each token.",
        )


def _validate_transport(params: SamplingParams) -> None:
    """Refuse what cannot be sent to the engine, where vLLM would answer with an error of the server."""
    for key in TRANSFERS:
        value = (params.extra_args or {}).get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise _refusal(key, value, f"{key} must be an object.")
        if value.get("do_remote_prefill"):
            raise _refusal(
                key,
                value,
                f"do_remote_prefill in {key} is not supported with diffusion models: no other engine has their K/V.",
            )
    if _has_more_levels(params.extra_args, MOST_LEVELS):
        raise _refusal("extra_args", None, f"extra_args may be nested {MOST_LEVELS} levels deep at most.")
    try:
        _send(params)
    except _UNSENDABLE:
        for name in params.__struct_fields__:
            value = getattr(params, name)
            try:
                _send(value)
            except _UNSENDABLE as error:
                message = f"{name}={shown(value)} cannot be sent to the engine: {shown(str(error))}."
                raise _refusal(name, value, message) from None


_UNSENDABLE = (OverflowError, UnicodeError)
"""Of integers beyond 64 bits, and of text that is no Unicode."""


def _has_more_levels(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than ``most`` levels deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, _NESTS)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, _NESTS) for each in level)


_NESTS = (dict, list, tuple)


def _send(value: object) -> None:
    # Objects that only their owner knows how to send are left to them.
    with contextlib.suppress(TypeError):
        msgspec.msgpack.encode(value, enc_hook=lambda _: None)


def _validate_options(
    params: SamplingParams,
    traits: FamilyTraits,
    block_length: int,
    engine: DllmConfig,
    max_tokens: int | None = None,
) -> ResolvedOptions:
    for key, value in (params.extra_args or {}).items():
        if isinstance(key, str) and key.startswith(_FOREIGN_PREFIX):
            raise _refusal(
                key,
                value,
                f"request option {shown(key)} is not for {traits.family} models; ours begin with 'dllm_'.",
            )
    try:
        options = resolve(parse_request_options(params.extra_args), engine, traits, block_length, max_tokens)
    except OptionError as error:
        key = REQUEST_PREFIX + error.key.removeprefix(REQUEST_PREFIX)
        raise _refusal(key, error.value, str(error)) from None
    if engine.eager and options.num_drafts:
        for name, off in PENALTIES.items():
            value = getattr(params, name)
            if value != off:
                raise _refusal(
                    name,
                    value,
                    f"{name} does not go with drafts on an engine with eager=True: penalties count the text of blocks "
                    "that are finished, and drafts begin a block before that; leave it out, or ask for "
                    "dllm_verify='none'.",
                )
    return options


def _refusal(parameter: str, value: object, message: str) -> VLLMValidationError:
    # The exception repeats both as they are, in the answer and in the log.
    return VLLMValidationError(message, parameter=_readable(parameter), value=_readable(value))


def _readable(value: Any) -> Any:
    """``value``, or what a message shows of it where that is long or not printable."""
    text = shown(value)
    printable = value.isprintable() if isinstance(value, str) else True
    return value if printable and len(text) <= MOST_SHOWN else text
