"""The C library, called through ctypes: the one handle that all of `sbx.linux` shares.

`call` is for functions of libc that answer -1 and set errno (see errno(3)); `syscall` for linux
calls that libc or Python have no name for (syscall(2)). Both raise OSError with the name of the
call in its text, so that a report says *what* was refused and not only `Operation not permitted`.
Both release the GIL while they wait. Arguments are int, bytes (passed as a C string or buffer),
None (NULL) or ctypes objects; an int is passed as a C long, so flags of 64 bits arrive whole.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(name: str, number: int, *args: Any) -> int:
    """Make the linux call `number`; `name` is only for the text of the OSError."""
    result: int = _libc.syscall(ctypes.c_long(number), *map(_as_c, args))
    if result == -1:
        raise error(name)
    return result


def call(name: str, *args: Any) -> int:
    """Call the libc function `name`, whose answer is an int and -1 means failure."""
    # getattr: the handle keeps what it has looked up, which `_libc[name]` would do anew each time
    result: int = getattr(_libc, name)(*map(_as_c, args))
    if result == -1:
        raise error(name)
    return result


def function(name: str, *types: Any) -> Callable[..., int]:
    """The function of libc itself, with arguments of these ctypes, for where `call` costs too much:
    0.6 µs instead of 5. It answers -1 for a failure, which `error` then makes an OSError."""
    found = ctypes.CDLL(None, use_errno=True)[name]
    found.argtypes = types
    bound: Callable[..., int] = found
    return bound


def error(name: str) -> OSError:
    """What the last call of `name`, which answered -1, failed of."""
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")


def _as_c(arg: Any) -> Any:
    return ctypes.c_long(arg) if isinstance(arg, int) else arg
