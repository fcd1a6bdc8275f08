"""The C library, called through ctypes. All of `sbx.linux` shares this one handle.

`call` is for functions of libc that return -1 and set errno (see errno(3)). `syscall` is for Linux
calls for which libc or Python has no function (syscall(2)). Both raise OSError with the name of the
call in its text, so that a report names the refused call and not only `Operation not permitted`.
Both release the GIL while they wait. Arguments are int, bytes (passed as a C string or buffer),
None (NULL) or ctypes objects. An int is passed as a C long, so that flags of 64 bits arrive whole.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(name: str, number: int, *args: Any) -> int:
    """Make the Linux call `number`. `name` appears only in the text of the OSError."""
    result: int = _libc.syscall(ctypes.c_long(number), *map(_as_c, args))
    if result == -1:
        raise error(name)
    return result


def call(name: str, *args: Any) -> int:
    """Call the libc function `name`, which returns an int and returns -1 on failure."""
    # getattr: the handle caches the function, and `_libc[name]` would look it up each time
    result: int = getattr(_libc, name)(*map(_as_c, args))
    if result == -1:
        raise error(name)
    return result


def function(name: str, *types: Any) -> Callable[..., int]:
    """Return a libc function with arguments of these ctypes, for callers that need speed.

    A call takes 0.6 µs instead of the 5 µs of `call`. The function returns -1 on failure; pass its
    name to `error` to get the OSError.
    """
    foreign = ctypes.CDLL(None, use_errno=True)[name]
    foreign.argtypes = types
    typed: Callable[..., int] = foreign
    return typed


def error(name: str) -> OSError:
    """Return the OSError for the last call of `name`, which returned -1."""
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")


def _as_c(arg: Any) -> Any:
    return ctypes.c_long(arg) if isinstance(arg, int) else arg
