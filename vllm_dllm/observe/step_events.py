"""Step events: what each forward of a streamed request did, to watch a text while it is denoised.

A request with ``dllm_step_events`` has an event in every output of its stream. vLLM sends outputs only where a block
ends; the scheduler adds outputs without tokens for the other forwards of such a request (``observe.metrics``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine import EngineCoreOutput

KEY = "dllm_step"
"""Of the event in ``kv_transfer_params``, and in a chunk of a server's stream."""


@dataclass(frozen=True)
class StepEvent:
    """Where a request's text stands after a forward. Each event has the whole window, so one may be missed.

    Attributes:
        forward: number of the forward among those of the request after its prefill, from 0.
        start: index in the answer of the window's first token.
        tokens: of the window, which is the current block and, with ``eager``, the blocks behind it, up to
            ``max_tokens``; None where a position is masked.
        unmasked: offsets in ``tokens`` that this forward gave a token.
        drafted: those of ``unmasked`` whose tokens are of an accepted draft.
        texts: text of each token, empty for special tokens and masks; None where nobody decoded them, which a server
            does.
        index: of the prompt, where a completion has several.
    """

    forward: int
    start: int
    tokens: tuple[int | None, ...]
    unmasked: tuple[int, ...]
    drafted: tuple[int, ...]
    texts: tuple[str, ...] | None = None
    index: int = 0

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "StepEvent":
        """The event that ``record`` was made of, whatever way the record came."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**fields)

    def record(self) -> dict[str, Any]:
        """The event as plain lists and numbers."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {name: value for name, value in plain.items() if value is not None}


def tell(output: "EngineCoreOutput", event: StepEvent) -> None:
    """Let an output carry the event. Its field is for engines that share K/V, which diffusion models do not."""
    output.kv_transfer_params = {KEY: event.record()}


def step_event(output: "RequestOutput") -> StepEvent | None:
    """What the last forward of a streamed request did.

    Args:
        output: of ``AsyncLLM.generate`` or ``LLMEngine.step``, for a request with ``dllm_step_events``. Where several
            outputs were merged because nobody took them in time, the event is the last one.

    Returns:
        None for outputs of other requests.
    """
    record = (output.kv_transfer_params or {}).get(KEY)
    if record is None:
        return None
    return StepEvent.of_record(record)


class StreamedEvents:
    """The events of a request with texts, as chunks of a server's stream (`vllm_dllm.patches.stream_events`)."""

    def __init__(self, tokenizer: Any):
        self.text_of = lru_cache(maxsize=None)(partial(token_text, tokenizer))
        self.special = frozenset(tokenizer.all_special_ids)

    def __call__(self, output: "RequestOutput", prompt: int) -> dict[str, Any] | None:
        """What the chunk of ``output`` has beside its head; None where the output has no event."""
        event = step_event(output)
        if event is None:
            return None
        # vLLM 0.33 has the field in the last chunk of a stream, too.
        output.kv_transfer_params = None
        return {KEY: replace(self.with_texts(event), index=prompt).record()}

    def with_texts(self, event: StepEvent) -> StepEvent:
        """The event with the texts of its tokens."""
        texts = tuple("" if token is None or token in self.special else self.text_of(token) for token in event.tokens)
        return replace(event, texts=texts)


def token_text(tokenizer: Any, token: int) -> str:
    """Text of a token as it reads behind another one.

    A token that is part of a character only has no text; its name in the vocabulary stands in for it.
    """
    # SentencePiece drops the space before the first token of a text: take the second of two.
    text: str = tokenizer.decode([token, token])[len(tokenizer.decode([token])) :]
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        text = tokenizer.convert_ids_to_tokens(token) or f"<{token}>"
    return text
