"""The errors of cells: the content of an `error` frame, and the wall that caused an error.

Linux only gives a number for a call that a wall refused. `reason` explains it to the reader of the
cell's error, and names the alternatives that the policy allows. This is help for the user, like the
import rules. The policy was probably the reason, but not certainly: a file may also lack a
permission bit.
"""

import errno
import os
import re
import traceback
import types
from collections.abc import Iterator
from typing import Any

from IPython.core.error import UsageError
from IPython.core.ultratb import AutoFormattedTB

from sbx.guest.kernel.display import cut

_MESSAGE_MAX = 64 * 1024
_TRACEBACK_MAX = 512 * 1024
_LINES_MAX = 10_000
_GUEST = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# Files of the frames above user code in a traceback.
_AROUND = ("/IPython/", _GUEST, "/comm/base_comm.py")
_READ_ONLY = (
    "Only /workspace and /tmp can be written to; files that the user uploaded are read-only and"
    " stay unchanged: work on a copy."
)
_COMPUTING_ONLY = (
    "The policy of this sandbox allows no processes, no new sockets, no shared memory or message"
    " queues of System V or POSIX, and no links or devices; threads are fine, and files can be"
    " written in /workspace and /tmp."
)
NO_PACKAGE = (
    "Packages come from the environment that the policy names, and cannot be installed from inside:"
    " its operator creates one with sbx env create NAME PACKAGE."
)
_INSTALLS = re.compile(r"\b(pip3?|conda|uv|poetry)\b.*\b(install|add)\b")
_DENIED = frozenset((errno.EPERM, errno.EACCES, errno.ENOSYS))
_OF_AN_UPLOAD = frozenset((errno.EPERM, errno.EACCES, errno.EXDEV))
_UPLOADS = ("/workspace/uploads/temparea", "/uploads")
_CHAIN_MAX = 8
_CONTEXTS_MAX = 500
_FRAMES_KEPT = 20  # at each end; IPython takes 3 ms for a frame
_ERRORS_KEPT = 20  # of a chain, the last ones


def error_content(etype: type, evalue: Any, lines: list[str] | None = None) -> dict[str, Any]:
    """Return the content of an `error` frame, also for errors whose own str() fails."""
    try:
        message = str(evalue)
    except Exception:  # noqa: BLE001 - user code
        message = "<the error's own __str__ failed>"
    if lines is None:
        lines = [f"{etype.__name__}: {message}"]
    content = {
        "ename": etype.__name__,
        "evalue": cut(message, _MESSAGE_MAX),
        "traceback": _bounded_lines([str(line) for line in lines]),
    }
    if isinstance(evalue, SystemExit) and not isinstance(evalue.code, int | None):
        content["exit_text"] = content["evalue"]
    return content


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a process that does not catch this error, as CPython does."""
    value = error.code
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF if -(2**63) <= value < 2**63 else 0xFF
    return 1


def describe(error: BaseException) -> dict[str, Any]:
    """Return `error_content` with a plain traceback, for an error that IPython did not show."""
    if isinstance(error, UsageError):
        return error_content(type(error), error)
    below = error.__traceback__
    while below and any(part in below.tb_frame.f_code.co_filename for part in _AROUND):
        below = below.tb_next
    try:
        lines = traceback.format_exception(
            type(error), error, without_guest(below), limit=-2 * _FRAMES_KEPT
        )
    except Exception:  # noqa: BLE001 - user code
        return error_content(type(error), error)
    return error_content(type(error), error, [line.rstrip("\n") for line in lines])


def _bounded_lines(lines: list[str]) -> list[str]:
    if sum(map(len, lines)) <= _TRACEBACK_MAX and len(lines) <= _LINES_MAX:
        return lines
    # The end has the error, the beginning the place in the cell.
    part = _TRACEBACK_MAX // 8
    return [cut(line, part) for line in (*lines[:3], "…", *lines[-4:])]


class BoundedTraceback(AutoFormattedTB):
    """IPython's traceback, of a bounded number of frames and errors.

    An interrupt while it is formatted, perhaps in a `__repr__` of user code, leaves the plain one.
    """

    _errors = 0
    _is_cut = False

    def structured_traceback(
        self, etype: type, evalue: Any, *args: Any, **kwargs: Any
    ) -> list[str]:
        self._errors, self._is_cut = 0, False
        try:
            lines = super().structured_traceback(etype, evalue, *args, **kwargs)
        except KeyboardInterrupt:
            return list(describe(evalue)["traceback"])
        if self._is_cut:
            lines.insert(1, "[... earlier errors of the chain]\n")
        return lines

    def get_parts_of_chained_exception(self, evalue: BaseException | None) -> Any:
        parts = super().get_parts_of_chained_exception(evalue)
        self._errors += 1
        self._is_cut = parts is not None and self._errors >= _ERRORS_KEPT
        return None if self._is_cut else parts

    def get_records(self, etb: types.TracebackType, context: int, tb_offset: int) -> Any:
        every = _frames_of(etb)
        if len(every) <= 2 * _FRAMES_KEPT:
            return super().get_records(etb, context, tb_offset)
        first, last = _linked(every[:_FRAMES_KEPT]), _linked(every[-_FRAMES_KEPT:])
        assert first is not None
        assert last is not None
        return [
            *super().get_records(first, context, tb_offset),
            _FramesLeftOut(len(every) - 2 * _FRAMES_KEPT),
            *super().get_records(last, context, tb_offset),
        ]

    def format_record(self, frame_info: Any) -> str:
        return (
            str(frame_info)
            if isinstance(frame_info, _FramesLeftOut)
            else super().format_record(frame_info)
        )


class _FramesLeftOut:
    """Takes the place of the frames in the middle, as IPython sees a frame."""

    _sd = None
    frame = types.SimpleNamespace(f_locals={})

    def __init__(self, count: int) -> None:
        self._count = count

    def __str__(self) -> str:
        return f"    [... {self._count} more frames]\n"


def _frames_of(below: types.TracebackType | None) -> list[types.TracebackType]:
    frames = []
    while below is not None:
        frames.append(below)
        below = below.tb_next
    return frames


def _linked(frames: list[types.TracebackType]) -> types.TracebackType | None:
    """Return a traceback of these frames."""
    result = None
    for frame in reversed(frames):
        result = types.TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def without_guest(below: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of the guest at its end, such as those of `input` and
    of the signal handler: the line of the user's code is the place of the error."""
    frames = _frames_of(below)
    while len(frames) > 1 and frames[-1].tb_frame.f_code.co_filename.startswith(_GUEST):
        frames.pop()
    return _linked(frames)


def without_callers(below: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of the guest at its beginning."""
    while below is not None and below.tb_frame.f_code.co_filename.startswith(_GUEST):
        below = below.tb_next
    return below


def reason(error: BaseException, *, processes: bool) -> str | None:
    """Return the explanation of an error by which Linux refused a call; None for any other error.

    `processes`: whether the policy lets a cell start processes.
    """
    for cause in _chain(error):
        if not isinstance(cause, OSError):
            continue
        if cause.errno == errno.EROFS or (cause.errno in _OF_AN_UPLOAD and _names_an_upload(cause)):
            return _READ_ONLY
        if cause.errno in _DENIED and not processes:
            return _COMPUTING_ONLY
    return None


def has_group(error: BaseException | None) -> bool:
    """Return whether an error, or one that came before it, is a group; also if they are too many to
    look at, where IPython's own question would be a RecursionError."""
    for _ in range(_CONTEXTS_MAX):
        if error is None or isinstance(error, BaseExceptionGroup):
            return error is not None
        error = error.__context__
    return True


def lacks_package(error: object) -> bool:
    """Return whether an import found no package, for which a user would try to install one."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return isinstance(name, str) and "." not in name


def installs(command: str) -> bool:
    """Return whether a shell command installs packages."""
    return _INSTALLS.search(command) is not None


def _names_an_upload(error: OSError) -> bool:
    paths = (error.filename, error.filename2)
    return any(
        os.path.abspath(path).startswith(_UPLOADS) for path in paths if isinstance(path, str)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes: a library wraps the PermissionError in its own error."""
    for _ in range(_CHAIN_MAX):
        if error is None:
            return
        yield error
        wrapped = getattr(error, "reason", None)  # used by urllib
        if isinstance(wrapped, BaseException):
            error = wrapped
        else:
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
