"""How a function in Python takes the place of a Triton kernel, or of a function that launches Triton kernels."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

Array = np.ndarray[Any, Any]
"""A numpy view of a tensor's memory."""


class LeftToTriton(Exception):
    """Raised by the fallback of a function for a case that stays with the function, and so with the interpreter."""


def adapt(original: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fallback`` with the parameters of ``original``, a Triton kernel or a function.

    The fallback gets the arguments that it names, and no others: strides and block sizes matter to a launch alone. It
    names them in lower case and without the suffix ``_ptr``; the default of every argument is None. A parameter
    annotated as ``Array`` gets a tensor's numpy view, which costs about a microsecond: a fallback takes the tensor
    itself where it seldom needs it. Its last parameters, where they have defaults, may be such that only some
    versions of vLLM have.

    Raises:
        TypeError: ``original`` has no such parameter.
    """
    names = list(getattr(original, "arg_names", None) or inspect.signature(original).parameters)
    places = {name.removesuffix("_ptr").lower(): place for place, name in enumerate(names)}
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(fallback).parameters.items()
        if name in places or parameter.default is parameter.empty
    }
    if unknown := parameters.keys() - places:
        raise TypeError(f"takes {', '.join(names)}, and no {', '.join(sorted(unknown))}")
    taken = [
        (places[name], Array in (parameter.annotation, *get_args(parameter.annotation)))
        for name, parameter in parameters.items()
    ]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *map(kwargs.get, names[len(args) :]))
        try:
            return fallback(
                *[given[at].numpy() if is_array and given[at] is not None else given[at] for at, is_array in taken]
            )
        except LeftToTriton:
            return original(*args, **kwargs)

    return call


def spread(lengths: Array) -> tuple[Array, Array]:
    """Return (row, offset inside the row) of every item of rows of these ``lengths``, each [sum(lengths)]."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
