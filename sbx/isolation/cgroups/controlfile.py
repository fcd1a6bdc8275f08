"""Read, write and parse control files of a cgroup file system, see cgroups(7).

Plain descriptors, because a refusal comes with write(2) itself: a buffered file would report it
at flush or close, or, when dropped, never, and the process would run on without limits.
"""

import errno
import os
from collections.abc import Iterable, Iterator

# On v1 no limit of memory is the largest multiple of a page that fits a long.
UNLIMITED_BYTES = 1 << 62


def read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode()


def write(path: str, text: str) -> None:
    """Write at once, so that Linux accepts all or nothing. Raise OSError with file and text."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, writing {text!r}", path) from error
    finally:
        os.close(descriptor)


def open_all(paths: Iterable[str]) -> list[int]:
    """Open all files for writing, or none. Raise OSError."""
    opened: list[int] = []
    try:
        for path in paths:
            opened.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))  # noqa: PERF401  # undone
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    return opened


def read_optional(path: str) -> str | None:
    """Return the text; None if Linux has no such file or the group is gone."""
    try:
        return read(path)
    except OSError as error:
        # ENODEV: the group was removed while its file was open
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return None
        raise


def number(text: str | None) -> int | None:
    """Return the number in a text; None for "max", for its forms of v1, or without a file."""
    if text is None or text.strip() in ("max", "-1"):
        return None
    value = int(text)
    return None if value >= UNLIMITED_BYTES else value


def field(text: str | None, name: str) -> int | None:
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def fields_sum(text: str | None, *names: str) -> int | None:
    """Return the sum of these ``name number`` lines. None if a line is missing."""
    numbers = [field(text, name) for name in names]
    return None if None in numbers else sum(filter(None, numbers))


def pids(group: str) -> list[int]:
    """Return the processes in a group; none if it is gone. Processes of invisible PID namespaces
    read as 0."""
    return [int(line) for line in (read_optional(f"{group}/cgroup.procs") or "").split()]


def upwards(group: str, name: str) -> Iterator[str]:
    """Yield the text of a file in `group` and in each group above it, as far as it exists."""
    while (text := read_optional(f"{group}/{name}")) is not None:
        yield text
        group = os.path.dirname(group)


def tightest(group: str, name: str) -> int | None:
    limits = [value for text in upwards(group, name) if (value := number(text)) is not None]
    return min(limits, default=None)
