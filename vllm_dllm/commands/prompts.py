"""Files of prompts."""

import json
from pathlib import Path
from typing import Any

Prompt = str | list[dict[str, Any]]
"""A user's message, or the messages of a chat."""


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: a line each, JSON objects with ``prompt`` or ``messages`` if it is called ``*.jsonl``.

    Raises:
        ValueError: a line is neither, or there is none; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    # JSON has strings with U+2028 and others at which `str.splitlines` would part lines.
    numbered = enumerate(text.split("\n"), 1)
    lines = [(number, line.strip()) for number, line in numbered if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no prompts")
    is_json = path.suffix == ".jsonl"
    return [_parse_line(line, f"{path}, line {number}") if is_json else line for number, line in lines]


def _parse_line(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    match value:
        case {"prompt": str(prompt)}:
            return prompt
        case {"messages": [_, *_] as messages} if all(map(_is_message, messages)):
            return messages
    raise ValueError(f'{where}: neither {{"prompt": "..."}} nor {{"messages": [{{"role": "...", "content": "..."}}]}}')


def _is_message(value: Any) -> bool:
    """Whether a value is a message of a chat whose content is text."""
    match value:
        case {"role": str(), "content": str() | None} | {"role": str(), "tool_calls": [_, *_]}:
            return True
        case {"role": str(), "content": [*parts]}:
            return all(isinstance(part.get("text") if isinstance(part, dict) else part, str) for part in parts)
    return False
