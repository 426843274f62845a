"""Arguments of requests, for ``create`` of the synchronous client and of the asynchronous one alike."""

from typing import Any

from .server import MODEL

TOKENS = 40
"""Length of an answer that nothing ends: several blocks, the last of them not whole."""

QUESTION = "Ada has 12 apples. Ben gives Ada 7 more. How many apples does Ada have now?"

CODE = "def add(first, second):\n"
"""Beginning of a text that goes on for long, where a chat's answer would be followed by tokens without text."""


def completion(prompt: str | list[int], *, body: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A greedy completion of ``TOKENS`` tokens unless told otherwise.

    Args:
        body: fields that the client does not know.
        fields: those it knows, and request options ``dllm_*``.
    """
    return {"prompt": prompt, **_common(fields, body)}


def chat(text: str, *, body: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The same for a chat of one message."""
    return {"messages": [{"role": "user", "content": text}], **_common(fields, body)}


def _common(fields: dict[str, Any], body: dict[str, Any] | None) -> dict[str, Any]:
    options = {name: fields.pop(name) for name in list(fields) if name.startswith("dllm_")}
    extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True, **(body or {})}
    if options:
        extra["vllm_xargs"] = options
    return {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, **fields, "extra_body": extra}
