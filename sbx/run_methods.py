"""The methods that run code, each defined once, and the forwarding of methods to another object."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def to_default(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of a sandbox that calls the same method of its conversation `default`."""
    name = method.__name__

    @functools.wraps(method)
    def forward(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(self._default, name)(*args, **kwargs)
        return result

    return forward
