"""What patches change: functions and properties of vLLM, looked up in the installed vLLM and checked."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from vllm_dllm.versions import TESTED

LOOKED_UP: list[tuple[Any, str]] = []
"""Owner and name of all that patches have looked up in this process."""


class VllmChangedError(RuntimeError):
    """The installed vLLM no longer has what a patch changes."""


def of_vllm(owner: Any, name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """The function ``owner.name`` that a patch wraps.

    Args:
        owner: class or module.
        parameters: names of its parameters that the patch relies on, in order; it may have more behind them.

    Raises:
        VllmChangedError: it is gone, or takes other parameters. Names vLLM's version and the symbol.
    """
    LOOKED_UP.append((owner, name))
    function = getattr(owner, name, None)
    if callable(function):
        found = tuple(inspect.signature(function).parameters)
        if found[: len(parameters)] == parameters:
            return function
        problem = f"takes ({', '.join(found)}) instead of ({', '.join(parameters)})"
        module = getattr(function, "__module__", None) or type(function).__module__
        if module.partition(".")[0] != "vllm":
            problem += f" (of the module {module})"
    else:
        problem = "is gone"
    raise _moved(owner, name, problem)


def property_of_vllm(owner: type, name: str) -> Callable[[Any], Any]:
    """The getter of a property that a patch wraps.

    Raises:
        VllmChangedError: it is gone, or no property any more. Names vLLM's version and the symbol.
    """
    LOOKED_UP.append((owner, name))
    found = vars(owner).get(name)
    if isinstance(found, property) and found.fget is not None:
        return found.fget
    raise _moved(owner, name, "is gone" if found is None else "is no property")


def wrap_validator(model: Any, name: str, around: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have a pydantic model validate by ``around(check, data)`` where it did by ``check(data)``.

    To be called before routes are made of the model: they hold its validators as they are then.

    Args:
        name: of a validator that runs before the fields are validated.

    Raises:
        VllmChangedError: there is no such validator.
    """
    check = of_vllm(model, name, ("data",))
    validators = model.__pydantic_decorators__.model_validators
    if name not in validators:
        raise _moved(model, name, "is no validator")
    validators[name].func = MethodType(lambda cls, data: around(check, data), model)
    model.model_rebuild(force=True)


def mentions(function: Callable[..., Any], text: str) -> bool:
    """Whether the code of a function names an attribute, or holds a string, that contains ``text``."""
    code = inspect.unwrap(function).__code__
    strings = (constant for constant in code.co_consts if isinstance(constant, str))
    return any(text in string for string in (*code.co_names, *strings))


def _moved(owner: Any, name: str, problem: str) -> VllmChangedError:
    import vllm

    where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return VllmChangedError(
        f"vllm-dllm changes {where}.{name}, which {problem} in the installed "
        f"vLLM {vllm.__version__}; vllm-dllm is made for vLLM {' and '.join(TESTED)}"
    )
