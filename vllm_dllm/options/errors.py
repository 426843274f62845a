"""Errors that name an option, its value and what is allowed."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

MOST_SHOWN = 200
"""Characters of a wrong value that a message repeats."""


class OptionError(ValueError):
    """An option has a wrong name or value. ``key`` and ``value`` are what the user wrote in a request."""

    def __init__(self, message: str, key: str = "", value: Any = None):
        super().__init__(message)
        self.key = key
        self.value = value


class MisplacedOptionError(OptionError):
    """A known option stands where it is not read. ``key`` is where the user wrote it."""


def shown(value: Any) -> str:
    """``value`` as a message repeats it: printable, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


NO_DRAFT_MODEL = (
    "a diffusion model drafts for itself, with every verifier; FeF-DLLM with another draft model costs a forward more "
    "per round and has fewer drafts accepted (docs/fef.md); leave it out"
)
"""Why there is no option ``draft_model``."""


def _reason_of(error: Any) -> str:
    # Pydantic's own messages begin with a capital letter; ours may name things that have some.
    message = str(error["msg"])
    return message.removeprefix("Value error, ") if error["type"] == "value_error" else message.lower()


_Options = TypeVar("_Options", bound=BaseModel)


def parse_options(
    model: type[_Options], values: dict[str, Any], prefix: str, where: str, of_engine: Collection[str] = ()
) -> _Options:
    """Validate ``values``. Messages call them ``where``, and a key by ``prefix`` and its name.

    Args:
        of_engine: names that are no options here, and are options of the engine.

    Raises:
        OptionError: names the key, its value and what is allowed.
    """
    try:
        options = model.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors()
        name, value = first["loc"][0], first["input"]
        key = f"{prefix}{name}"
        if name == "draft_model":
            raise OptionError(f"{where} {key}={shown(value)} is not allowed: {NO_DRAFT_MODEL}", key, value) from None
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(f"{prefix}{field}" for field in model.model_fields)
            hint = _hint(str(name), model.model_fields, prefix, of_engine)
            raise OptionError(f"unknown {where} {shown(key)}{hint}; allowed: {allowed}", key, value) from None
        # An option that may have several types has an error for each.
        alternatives = [first, *(each for each in others if each["loc"][0] == name)]
        if first["type"] == "literal_error" and len(alternatives) == 1:
            reason = f"allowed: {first['ctx']['expected']}"
        else:
            reason = ", or ".join(map(_reason_of, alternatives))
        raise OptionError(f"{where} {key}={shown(value)} is not allowed: {reason}", key, value) from None
    for name, value in values.items():
        # Pydantic takes true for 1.
        if isinstance(value, bool) and not isinstance(getattr(options, name), bool):
            key = f"{prefix}{name}"
            raise OptionError(f"{where} {key}={value} is not allowed: it is no number", key, value)
    return options


def _hint(name: str, known: Collection[str], prefix: str, of_engine: Collection[str]) -> str:
    """What an unknown ``name`` was meant to be, in brackets."""
    if name in of_engine:
        return f" ({name} is an option of the engine)"
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""
