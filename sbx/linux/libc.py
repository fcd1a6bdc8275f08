"""The C library, called through ctypes: the one handle that all of `sbx.linux` shares.

`call` is for functions of libc that answer -1 and set errno (see errno(3)); `syscall` for linux
calls that libc or Python have no name for (syscall(2)). Both raise OSError with the name of the
call in its text, so that a report says *what* was refused and not only `Operation not permitted`.
Both release the GIL while they wait. Arguments are int, bytes (passed as a C string or buffer),
None (NULL) or ctypes objects; an int is passed as a C long, so flags of 64 bits arrive whole.
"""

import ctypes
import os
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(name: str, number: int, *args: Any) -> int:
    """Make the linux call `number`; `name` is only for the text of the OSError."""
    result: int = _libc.syscall(ctypes.c_long(number), *map(_as_c, args))
    if result == -1:
        raise _error(name)
    return result


def call(name: str, *args: Any) -> int:
    """Call the libc function `name`, whose answer is an int and -1 means failure."""
    result: int = _libc[name](*map(_as_c, args))
    if result == -1:
        raise _error(name)
    return result


def _as_c(arg: Any) -> Any:
    return ctypes.c_long(arg) if isinstance(arg, int) else arg


def _error(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")
