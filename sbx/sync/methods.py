"""The binding of synchronous classes to asynchronous ones: a class names the methods that it has.

    run = call(Context.run)     a method; an event loop in a thread runs each call
    id = Attribute[str]()       an attribute that does not change
    files = Part(BlockingFiles) a part, as a synchronous class

Calls may come from any thread. Ctrl-C cancels the call, and interrupts its run.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from sbx.aio import Loop
from sbx.protocol.runs import Event

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
B = TypeVar("B", bound="Blocking")
B_co = TypeVar("B_co", bound="Blocking", covariant=True)
AsyncMethod = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]


class Blocking:
    """A synchronous counterpart of `inner`, which lives on `loop`."""

    def __init__(self, loop: Loop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner
        self._parts = inner  # the object that has `files` and so on


class Method(Generic[P, T]):
    """A method of `inner`; `finish` calls it and returns the result. Its documentation is that of
    the asynchronous method."""

    def __init__(self, method: Any, finish: Callable[[Blocking, Callable[[], Any]], T]) -> None:
        self._name: str = method if isinstance(method, str) else method.__name__
        self._finish = finish

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, T]: ...
    def __get__(self, instance: Blocking | None, owner: type) -> "Callable[P, T] | Self":
        if instance is None:
            return self
        method = getattr(instance._inner, self._name)

        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return self._finish(instance, partial(method, *args, **kwargs))

        return call


class Attribute(Generic[T_co]):
    """An attribute of `inner` that does not change."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Blocking, owner: type) -> T_co: ...
    def __get__(self, instance: Blocking | None, owner: type) -> "T_co | Self":
        if instance is None:
            return self
        value: T_co = getattr(instance._inner, self._name)
        return value


class Part(Generic[B_co]):
    """A part of `inner`, such as its files, as a counterpart of this kind."""

    def __init__(self, kind: type[B_co]) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Blocking, owner: type) -> B_co: ...
    def __get__(self, instance: Blocking | None, owner: type) -> "B_co | Self":
        if instance is None:
            return self
        return self._kind(instance._loop, getattr(instance._parts, self._name))


def call(method: AsyncMethod[P, T]) -> Method[P, T]:
    """Wait for the result of the method."""
    return Method(method, lambda self, begin: self._loop.call(begin()))


def each(method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]]) -> Method[P, Iterator[T]]:
    """Yield the items of the method as the caller consumes them."""
    return Method(method, lambda self, begin: self._loop.each(begin()))


def wrap(method: AsyncMethod[P, Any], kind: type[B]) -> Method[P, B]:
    """Return the counterpart of the result."""
    return Method(method, lambda self, begin: kind(self._loop, self._loop.call(begin())))


def wrap_all(method: AsyncMethod[P, Sequence[Any]], kind: type[B]) -> Method[P, list[B]]:
    """Return the counterpart of each item."""

    def finish(self: Blocking, begin: Callable[[], Any]) -> list[B]:
        return [kind(self._loop, inner) for inner in self._loop.call(begin())]

    return Method(method, finish)


def follow(method: Callable[Concatenate[Any, P], Any]) -> Method[P, Iterator[Event]]:
    """Start a run now, and yield its events as the caller consumes them. Ctrl-C interrupts the run;
    a caller that stops to consume does not."""

    def finish(self: Blocking, begin: Callable[[], Any]) -> Iterator[Event]:
        async def begun() -> Any:
            return begin()

        return _events(self, self._loop.call(begun()))

    return Method(method, finish)


def _events(kernel: Blocking, run: Any) -> Iterator[Event]:
    try:
        yield from kernel._loop.each(run.events())
    except KeyboardInterrupt:
        kernel._loop.call(kernel._inner.give_up(run))
        raise
