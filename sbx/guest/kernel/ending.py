"""The end of a process that ran user code: CPython itself finalises it.

A process leaves its loop by `Leave`, which unwinds the stack up to `run_to_end` in the entry point,
and returns from its main function. So all steps of an end (threads, atexit, open files, finalisers)
are CPython's own, in its order. The zygote has imported much that no program needs, and tearing all
of it down takes 100 ms. So the last function of atexit, which is registered here before any other,
shortens the rest: the modules of the start are left to Linux, and so is everything if no object of
the program can act in its end.
"""

import _thread
import _weakref
import atexit
import gc
import itertools
import os
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

# These have no finaliser that user code or another process could notice. Others may have one: a
# file, a generator in a `try`, a class with `__del__`, an extension type.
_INERT = frozenset(
    (
        *(bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice),
        *(tuple, list, dict, set, frozenset, property, staticmethod, classmethod, object, type),
        *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType),
        *(types.CellType, types.ModuleType, types.FrameType, types.TracebackType),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType),
        *(types.MappingProxyType, types.SimpleNamespace, types.GenericAlias, _thread.LockType),
        *(deque, itertools.count, _thread.RLock),
    )
)
_PLAIN_PACKAGES = ("sbx.guest.", "IPython.", "traitlets.", "importlib.")
_PLAIN_MODULES = frozenset(
    (
        *("_frozen_importlib", "_frozen_importlib_external", "_abc", "_collections", "pathlib"),
        *("ast", "_ast", "ctypes"),
    )
)
_PLAIN_NAMES = frozenset(
    ("_thread._localdummy", "builtins.PyCapsule", "builtins._RunningLoopHolder")
)


class Leave(BaseException):
    """Leave all functions of the guest. `rest` then returns the exit code of the process."""

    def __init__(self, rest: Callable[[], int]) -> None:
        super().__init__()
        self.rest = rest


class _End:
    code = 0
    modules = 0  # that are kept
    names: frozenset[str] = frozenset()
    streams: tuple[object, ...] = ()
    stop_output: Callable[[], None] | None = None


_end = _End()


def run_to_end(main: Callable[[], object]) -> NoReturn:
    """Call `main`, and then the rest of a process that left it. Call this at the top level."""
    rest: Callable[[], int] | None = None
    try:
        main()
    except Leave as leave:
        rest = leave.rest  # called below: no error of a program has `Leave` as its context
    _end.code = rest() if rest is not None else 0
    sys.exit(_end.code)


def keep_modules() -> None:
    """Set the present modules apart: they are never torn down. A zygote does this for all its
    forks, because it writes to each module."""
    names = modules_of_user_code()
    modules: list[Any] = [{name: sys.modules[name] for name in names}]
    modules.append(modules)  # once `gc.freeze` was called, a cycle keeps itself alive
    _end.names |= frozenset(names)
    _end.modules = len(sys.modules)


def modules_of_user_code() -> list[str]:
    """Return the names of the modules that were imported after the last call of `keep_modules`.
    Touch no other: in a fork, each would be a page to copy."""
    new = max(0, len(sys.modules) - _end.modules)
    return list(itertools.islice(reversed(sys.modules), new))


def user_code_begins(stop_output: Callable[[], None] | None = None) -> None:
    """Note the standard streams of the process. `stop_output` is called after the handlers of
    atexit; after it, no thread of the guest runs."""
    _end.streams = (sys.stdin, sys.stdout, sys.stderr)
    _end.stop_output = stop_output
    gc.freeze()


def forget_handlers(count: int) -> None:
    """Remove what the code of the parent process registered for its own end, in a fork that must
    not do it too. `count`: the functions of atexit that were registered before that code."""
    weakref = sys.modules.get("weakref")
    if weakref is not None:
        weakref.finalize._registry.clear()
    if atexit._ncallbacks() > count:
        atexit._clear()
        atexit.register(_shorten)
        if weakref is not None:
            weakref.finalize._registered_with_atexit = False
        if "logging" in sys.modules:
            atexit.register(sys.modules["logging"].shutdown)


def _shorten() -> None:
    if not _end.names:
        return
    stop_output, _end.stop_output = _end.stop_output, None
    if stop_output is not None:
        stop_output()
    if _flushed() and _is_inert(gc.get_objects()):
        os._exit(_end.code)
    for name in _end.names - {"sys", "builtins", "__main__"}:
        sys.modules.pop(name, None)


def _flushed() -> bool:
    """Return whether the standard streams are those of the start, and have nothing to write."""
    if _end.streams != (sys.stdin, sys.stdout, sys.stderr):
        return False
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False  # CPython reports it, with the exit code 120
    return True


def _is_inert(objects: list[Any]) -> bool:
    """Return whether no object of the program, and no untracked object in one, acts in its end."""
    leaves = (each for each in gc.get_referents(*objects) if not gc.is_tracked(each))
    kinds = {*map(type, objects), *map(type, leaves)}
    if _weakref.ReferenceType in kinds:
        kinds.remove(_weakref.ReferenceType)
        references = (each for each in objects if type(each) is _weakref.ReferenceType)
        if not all(_is_inert_callback(each.__callback__) for each in references):
            return False
    return all(kind in _INERT or issubclass(kind, type) or _is_plain(kind) for kind in kinds)


def _is_inert_callback(callback: Any) -> bool:
    """Return whether the callback of a weak reference is absent, or only cleans up a container."""
    return isinstance(callback, types.BuiltinFunctionType | None) or (
        getattr(callback, "__module__", "") in ("weakref", "_weakrefset")
    )


def _is_plain(kind: type) -> bool:
    """Return whether a class of the guest, of IPython or of the import system has no finaliser."""
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    is_plain = (
        module in _PLAIN_MODULES
        or module.startswith(_PLAIN_PACKAGES)
        or f"{module}.{kind.__name__}" in _PLAIN_NAMES
    )
    return is_plain and not hasattr(kind, "__del__")


atexit.register(_shorten)
