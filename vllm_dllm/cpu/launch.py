"""How a function in Python takes the place of a Triton kernel, or of a function that launches Triton kernels."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

Array = np.ndarray[Any, Any]
"""A numpy view of a tensor's memory."""


class LeftToTriton(Exception):
    """Raised by a fallback for a case that it leaves to the original, and so to Triton's interpreter."""


def adapt(original: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fallback`` with the parameters of ``original``, a Triton kernel or a function.

    The fallback gets the arguments that it names, and no others: strides and block sizes matter to a launch alone. It
    names them in lower case and without the suffix ``_ptr``. A parameter annotated as ``Array`` gets a tensor's numpy
    view, which costs about a microsecond: a fallback takes the tensor itself where it seldom needs it.

    Raises:
        TypeError: ``original`` has no such parameter.
    """
    names = [*(getattr(original, "arg_names", None) or inspect.signature(original).parameters)]
    theirs = {name.removesuffix("_ptr").lower(): name for name in names}
    parameters = inspect.signature(fallback).parameters
    if unknown := parameters.keys() - theirs:
        raise TypeError(f"takes {', '.join(names)}, and no {', '.join(sorted(unknown))}")
    taken = [
        (own, names.index(theirs[own]), theirs[own], Array in (parameter.annotation, *get_args(parameter.annotation)))
        for own, parameter in parameters.items()
    ]

    def call(*args: Any, **kwargs: Any) -> Any:
        given, num_positional = {}, len(args)
        for own, place, name, is_array in taken:
            if place < num_positional:
                value = args[place]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            given[own] = value.numpy() if is_array and value is not None else value
        try:
            return fallback(**given)
        except LeftToTriton:
            return original(*args, **kwargs)

    return call
