"""What a request may ask of a diffusion model, decided when it is admitted.

Every field of ``SamplingParams`` is either honoured by the sampler, has no meaning for it (how text is
returned), or is refused here, so that nothing a user asks for is silently ignored.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_dllm.geometry import Geometry
from vllm_dllm.methods import VERIFIER_ROWS
from vllm_dllm.options.errors import MOST_SHOWN, MisplacedOptionError, OptionError, shown
from vllm_dllm.options.infill import fill_in
from vllm_dllm.options.resolve import resolve_request
from vllm_dllm.options.resolved import RESOLVED_KEY, ResolvedOptions
from vllm_dllm.options.schema import REQUEST_PREFIX, parse_request_options
from vllm_dllm.runtime.plan.spans import Spans

_NO_PROMPT_LOGPROBS = (
    "most diffusion models predict masked positions from both sides, so a prompt token has no next-token distribution"
)
REFUSED_FIELDS: dict[str, str] = {
    "prompt_logprobs": f"{_NO_PROMPT_LOGPROBS}; `echo` together with `logprobs` asks for the same",
    "prompt_logprob_token_ids": _NO_PROMPT_LOGPROBS,
    "logprob_token_ids": "ask for the most likely tokens with `logprobs` instead",
    "trace_decode_token_ids": "a replayed trace fixes one token per step, a diffusion model unmasks blocks",
}
"""Fields of ``SamplingParams`` that diffusion models cannot honour, with the reason a user is given."""


class Limit(NamedTuple):
    """A number of a request that may not exceed what the engine can do."""

    parameter: str
    most: int
    measure: Callable[[SamplingParams], int]
    message: str
    """With places for ``most`` and for the measured ``size``."""


LIMITS = (
    # vLLM's sampler has room for as many. It checks in the worker, where too many end the engine.
    Limit(
        "allowed_token_ids",
        1024,
        lambda params: len(params.allowed_token_ids or ()),
        "allowed_token_ids may hold {most} tokens at most, not {size}.",
    ),
    Limit(
        "logit_bias",
        1024,
        lambda params: len(params.logit_bias or ()),
        "logit_bias may hold {most} tokens at most, not {size}.",
    ),
    # vLLM's sampler has room for 128 stop tokens that min_tokens holds back; the rest is for the model's own.
    Limit(
        "stop_token_ids",
        120,
        lambda params: len(params.stop_token_ids or ()) if params.min_tokens > 0 else 0,
        "min_tokens can hold back {most} stop_token_ids at most, not {size}.",
    ),
    # The sampler keeps a table of that shape for all requests.
    Limit(
        "bad_words",
        16384,
        # vLLM takes each word with and without a space before it.
        lambda params: (
            2 * len(params.bad_words or ()) * max((len(w.encode()) for w in params.bad_words or ()), default=0)
        ),
        "bad_words are too long: twice their number times the bytes of the longest may be {most} at most, not {size}.",
    ),
    # The worker keeps the length that min_tokens makes as a 32-bit integer.
    Limit("min_tokens", 1 << 30, lambda params: params.min_tokens, "min_tokens may be {most} at most."),
    # The scheduler looks for patterns of every size behind each token, while all requests wait.
    Limit(
        "repetition_detection",
        256,
        lambda params: 0 if params.repetition_detection is None else params.repetition_detection.max_pattern_size,
        "max_pattern_size of repetition_detection may be {most} at most: the scheduler looks for patterns of every "
        "size behind each token.",
    ),
)

MOST_BAD_WORD_TOKENS = 64
"""Most tokens of a bad word. vLLM takes 128 words at most (``VLLM_MAX_NUM_BAD_WORDS``), and the sampler's table grows
to as many words as any request had, each as long as the longest."""

MOST_LEVELS = 16
"""Most levels of lists and objects in ``extra_args``. The engine pickles them for its workers, level by level, and ends
where that fails."""

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Keys of ``extra_args`` about the caches of other engines, which diffusion models do not share."""

PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Parameters that count the text so far, with the value that turns each off."""

NO_MASKS = np.empty(0, dtype=np.int64)

_FOREIGN_PREFIX = "diffusion_"
"""Options of vLLM's own canvas-diffusion models. Some change how many rows the scheduler hands out."""


def validate_sampling_params(params: SamplingParams, family: str) -> None:
    """Refuse what the sampler of a diffusion model cannot honour, and what cannot be sent to the engine.

    vLLM checks ranges, vocabulary bounds and structured outputs itself, before and after this function. `admit_request`
    looks at our options, because it knows ``max_tokens``.

    Args:
        params: the request's parameters, with the server's defaults already in them. They may be shared by requests.
        family: of the model that is served.

    Raises:
        VLLMValidationError: names the parameter, its value and the reason. Over HTTP the answer is a status 400.
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
    # The worker keeps seeds as 64-bit integers. The answers of a request take its seed and those that follow it.
    if params.seed is not None and not -(2**63) <= params.seed <= 2**63 - params.n:
        raise _refusal(
            "seed",
            params.seed,
            f"seed={params.seed} is not allowed with n={params.n}: each answer takes the seed after that of the one "
            "before, and all must be between -2**63 and 2**63 - 1.",
        )
    _check_transport(params)
    for limit in LIMITS:
        size = limit.measure(params)
        if size > limit.most:
            raise _refusal(limit.parameter, size, limit.message.format(most=limit.most, size=size))
    for key, value in (params.extra_args or {}).items():
        if isinstance(key, str) and key.startswith(_FOREIGN_PREFIX):
            raise _refusal(
                key, value, f"request option {shown(key)} is not for {family} models; ours begin with 'dllm_'."
            )


def check_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt with tokens that the model has no embeddings of, which would end the engine.

    vLLM goes by the tokenizer, of which there may be none, or one with more tokens than the model.

    Raises:
        VLLMValidationError: names the token.
    """
    for token in (min(prompt_token_ids, default=0), max(prompt_token_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise _refusal(
                "prompt_token_ids",
                token,
                f"token id {token} is out of vocabulary: the model has 0 to {vocab_size - 1}.",
            )


def admit_request(
    prompt_length: int,
    params: SamplingParams,
    geometry: Geometry,
    *,
    masks: np.ndarray = NO_MASKS,
    resumable: bool = False,
) -> None:
    """Resolve the options of a request and leave them in ``params``, or refuse the request.

    Args:
        params: the request's own parameters, ``max_tokens`` included; ``extra_args`` is replaced. So are ``max_tokens``
            and what ends a text, where the request fills in masks.
        masks: [M] int64: positions of mask tokens in the prompt, in rising order.
        resumable: further prompts are to follow the answer (a streaming session).

    Raises:
        VLLMValidationError: as `validate_sampling_params`; also where no step has room for the request.
    """
    if params.bad_words and params.bad_words_token_ids is None:
        raise _refusal("bad_words", params.bad_words, "bad_words need a tokenizer, which this engine started without.")
    longest = max(map(len, params.bad_words_token_ids or ()), default=0)
    if longest > MOST_BAD_WORD_TOKENS:
        raise _refusal(
            "bad_words",
            longest,
            f"a bad word may have {MOST_BAD_WORD_TOKENS} tokens at most, and the longest has {longest}.",
        )
    if geometry.traits.sees_whole_text and resumable:
        raise _refusal(
            "resumable",
            resumable,
            f"streaming sessions are not supported with {geometry.traits.family} models: they compute a text whole, so "
            "one that goes on would have to begin anew.",
        )
    try:
        if parse_request_options(params.extra_args).infill is True and len(masks):
            params.max_tokens = len(masks)
        options = resolve_request(params, geometry)
        if options.infill:
            options = fill_in(prompt_length, masks, params, options, geometry)
            prompt_length -= len(masks)
    except MisplacedOptionError as error:
        raise _refusal(error.key, error.value, str(error)) from None
    except OptionError as error:
        key = REQUEST_PREFIX + error.key.removeprefix(REQUEST_PREFIX)
        raise _refusal(key, error.value, str(error)) from None
    if resumable and options.structured:
        raise _refusal(
            "structured_outputs",
            params.structured_outputs,
            "structured outputs are not supported in streaming sessions: a session keeps the grammar that it began "
            "with, or none; send a request of its own.",
        )
    if options.structured and geometry.traits.verifier is not None:
        raise _refusal(
            "structured_outputs",
            params.structured_outputs,
            f"structured outputs are not supported with {geometry.traits.family} models: a forward drafts several "
            "tokens, and a grammar knows the text before each of them only when they are verified.",
        )
    _check_text_before(params, options, geometry)
    _check_step_events(params, options)
    _check_thinking(params, options, geometry)
    if geometry.traits.sees_whole_text:
        _check_rows_of_text(prompt_length, params, options, geometry)
    # The record is a plain dictionary of numbers and words, because ``extra_args`` travels as msgpack and as pickle.
    others = {
        key: value
        for key, value in (params.extra_args or {}).items()
        if not (isinstance(key, str) and key.startswith(REQUEST_PREFIX))
    }
    record = dataclasses.asdict(options) | {"hole_runs": [*map(list, options.hole_runs)]}
    params.extra_args = {**others, RESOLVED_KEY: record}


def _check_text_before(params: SamplingParams, options: ResolvedOptions, geometry: Geometry) -> None:
    """Refuse what goes by the text before a token, where that text is not known yet."""
    remedy = "leave it out, or ask for dllm_verify='none'"
    if VERIFIER_ROWS[options.verify].is_autoregressive:
        where, refused = f"dllm_verify={options.verify!r}", {**PENALTIES, "bad_words": None}
        if geometry.traits.verifier:
            where, refused = f"{geometry.traits.family} models", {"bad_words": None}
        reason = "it depends on the text before each token, and a forward verifies many tokens"
        remedy = "leave it out" if geometry.traits.verifier else remedy
    elif geometry.options.eager and options.num_drafts:
        where, refused = "drafts on an engine with eager=True", {**PENALTIES}
        reason = "penalties count the text of blocks that are finished, and drafts begin a block before that"
    else:
        return
    for name, off in refused.items():
        value = getattr(params, name)
        if value not in (off, []):
            message = f"{name} does not go with {where}: {reason}; {remedy}."
            raise _refusal(name, value, message)


def _check_step_events(params: SamplingParams, options: ResolvedOptions) -> None:
    key = f"{REQUEST_PREFIX}step_events"
    if options.step_events and params.output_kind == RequestOutputKind.FINAL_ONLY:
        raise _refusal(
            key,
            True,
            f"{key}=True goes with a stream, and this request gets its answer at the end; over HTTP give stream=true, "
            "offline AsyncLLM or LLMEngine with output_kind=RequestOutputKind.DELTA.",
        )
    if options.step_events and params.n > 1:
        # vLLM merges the outputs of a step of all answers, and with them their events.
        raise _refusal(key, True, f"{key}=True goes with n=1, not n={params.n}; send as many requests instead.")


def _check_thinking(params: SamplingParams, options: ResolvedOptions, geometry: Geometry) -> None:
    """Refuse a budget of reasoning where what a block is given cannot be known when the block begins."""
    reason = None
    if params.thinking_token_budget is None:
        return
    if geometry.window_blocks > 1:
        reason = "an engine with eager: blocks of a window begin before the text in front of them is known"
    elif options.structured:
        reason = "structured outputs: a grammar writes its blocks from left to right; leave one of them out"
    elif options.verify == "s2d2":
        reason = "dllm_verify=s2d2: drafts of a block are verified against the text before them; give another verifier"
    elif options.infill:
        reason = "dllm_infill: the text around the masks is there already; leave one of them out"
    if reason is not None:
        name, value = "thinking_token_budget", params.thinking_token_budget
        raise _refusal(name, value, f"{name} does not go with {reason}.")


def _check_rows_of_text(
    prompt_length: int, params: SamplingParams, options: ResolvedOptions, geometry: Geometry
) -> None:
    """Refuse a text that no step has room for, where a step computes all of it."""
    assert params.max_tokens is not None
    length, rows = geometry.block_length, geometry.step_rows
    num_tokens = min(params.max_tokens, geometry.max_model_len - prompt_length)
    window = num_tokens if options.infill else -(-num_tokens // length) * length
    # A refresh of the last block computes all of the text, whatever the generation window.
    guided = options.cfg_scale > 0
    if (1 + guided) * (prompt_length + window) > rows:
        blocks = "" if options.infill else f", in whole blocks of {length}"
        twice = f", with cfg_scale={options.cfg_scale} twice" if guided else ""
        raise _refusal(
            "max_tokens",
            params.max_tokens,
            f"a prompt of {prompt_length} tokens and {window} to be generated (max_tokens={params.max_tokens}{blocks}) "
            f"make {prompt_length + window}. {geometry.traits.family} models compute a text whole{twice}, and a step "
            f"has room for {rows} tokens ({geometry.rows_option}); shorten either, or raise {geometry.rows_option}.",
        )
    if options.needs_all_drafts:
        _check_rows_of_drafts(prompt_length, num_tokens, options, geometry)


def _check_rows_of_drafts(prompt_length: int, num_tokens: int, options: ResolvedOptions, geometry: Geometry) -> None:
    """Refuse drafts that no step has room for, where tokens depend on their number: they come all or not at all."""
    spans = Spans.of(geometry)
    text_end = spans.text_end(prompt_length, num_tokens, infill=bool(options.infill))
    starts = np.arange(prompt_length, text_end, geometry.block_length)
    branch_rows = int(spans.draft(starts, spans.window_end(starts, text_end)).length.max())
    num_rows = (1 + options.num_drafts) * branch_rows
    # Where K/V is kept all rows of such a step are vLLM's draft rows, of which a step has one less.
    room = geometry.step_rows if spans.cache == "none" else geometry.step_rows - 1
    if num_rows > room:
        raise _refusal(
            f"{REQUEST_PREFIX}drafts",
            options.num_drafts,
            f"{options.num_drafts} drafts and the text itself, up to {branch_rows} rows each with "
            f"cache={spans.cache!r}, make {num_rows}, and a step has room for {room} "
            f"({geometry.rows_option}={geometry.step_rows}). With verify='psd', verify='fef' and match='subset' tokens "
            "depend on the number of drafts, so they come all or not at all; ask for fewer (dllm_drafts, dllm_window), "
            f"or raise {geometry.rows_option}.",
        )


def _check_transport(params: SamplingParams) -> None:
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
    for name in params.__struct_fields__:
        value = getattr(params, name)
        try:
            # Objects that only their owner knows how to send (``TypeError``) are left to them.
            with contextlib.suppress(TypeError):
                msgspec.msgpack.encode(value, enc_hook=lambda _: None)
        except (OverflowError, UnicodeError) as error:  # integers beyond 64 bits, text that is no Unicode
            message = f"{name}={shown(value)} cannot be sent to the engine: {shown(str(error))}."
            raise _refusal(name, value, message) from None


def _has_more_levels(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than ``most`` levels deep."""
    level = [value]
    for _ in range(most + 1):
        nested = [each for each in level if isinstance(each, (dict, list, tuple))]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(nested)


def _refusal(parameter: str, value: object, message: str) -> VLLMValidationError:
    # The exception repeats both as they are, in the answer and in the log.
    return VLLMValidationError(message, parameter=_readable(parameter), value=_readable(value))


def _readable(value: Any) -> Any:
    """``value``, or what a message shows of it where that is long or not printable."""
    text = shown(value)
    printable = value.isprintable() if isinstance(value, str) else True
    return value if printable and len(text) <= MOST_SHOWN else text
