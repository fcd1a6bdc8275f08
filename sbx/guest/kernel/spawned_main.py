"""The module `__main__` of a process that `multiprocessing` starts by spawn or forkserver from a
cell, where the names of the notebook do not exist.

CPython's error for such a name ends the worker, and a pool replaces it without end: the caller
waits until the time-out. Here each name exists, and its use raises the error in the task, which the
pool reports to the caller. The kernel names this module in the `__spec__` of its `__main__`, which
`multiprocessing` passes to the child. All names here are private, because public ones would hide
those of a cell.
"""

import importlib.machinery as _machinery
import typing as _typing

_PACKAGE = __file__.rpartition("/guest/")[0] + "/__init__.py"


class _MainSpec(_machinery.ModuleSpec):
    """The `__spec__` of the `__main__` of cells."""

    def __init__(self) -> None:
        super().__init__("__main__", None)

    @property  # type: ignore[override]
    def name(self) -> str | None:
        """The name of this module, unless another `sbx` comes first on the path of the child."""
        spec = _machinery.PathFinder.find_spec("sbx")
        is_first = spec is not None and spec.origin == _PACKAGE
        return "sbx.guest.kernel.spawned_main" if is_first else None

    @name.setter
    def name(self, value: str) -> None:
        """Accept the name that the class above sets."""


class _Missing(type):
    """Stands for a function or a class of a cell."""

    def __call__(cls, *args: object, **kwargs: object) -> _typing.Never:
        raise _error(cls.__name__)

    def __getattr__(cls, name: str) -> _typing.Never:
        raise _error(cls.__name__)


def _error(name: str) -> AttributeError:
    return AttributeError(
        f"'{name}' is defined in a cell, and a process that is started by spawn or forkserver does"
        ' not have it: use multiprocessing.get_context("fork"), or define it in a file and import'
        " it"
    )


def _new(cls: type, *args: object, **kwargs: object) -> object:
    return object.__new__(cls)


def _setstate(self: object, state: object) -> None:
    """Accept the state of an object of the class."""


def _get(self: object, name: str) -> _typing.Never:
    raise _error(type(self).__name__)


def __getattr__(name: str) -> _typing.Any:
    if name.startswith("__"):
        raise AttributeError(name)
    members = {"__new__": _new, "__setstate__": _setstate, "__getattr__": _get}
    return _Missing(name, (), members)
