"""Who uses an environment: policies that name it, and processes that are shown it now."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sbx.environments.record import Environment
from sbx.errors import SbxError
from sbx.policy import available, load

_MOUNTS_MAX = 4 << 20


def policies_naming(name: str, search: Sequence[Path]) -> list[str]:
    """The policies whose interpreter it is; one that cannot be loaded names none."""
    found = []
    for info in available(search):
        with suppress(SbxError):
            if load(info.name, search=search).environment == name:
                found.append(info.name)
    return found


def processes_shown(environment: Environment) -> list[int]:
    """Processes of sandboxes, or of zygotes kept ready for them, in whose view it is mounted.

    As root of all users, else of those that linux lets this one look at: its own.
    """
    places = {str(environment.venv), os.path.realpath(environment.venv)}
    return [pid for pid in _pids() if places & set(_mount_points(pid))]


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            yield int(name)


def _mount_points(pid: int) -> Iterator[str]:
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as lines:
            text = lines.read(_MOUNTS_MAX)
    except OSError:
        return
    for line in text.splitlines():
        fields = line.split(b" ", 5)
        if len(fields) > 5:
            yield os.fsdecode(re.sub(rb"\\([0-7]{3})", _byte, fields[4]))


def _byte(escaped: "re.Match[bytes]") -> bytes:
    return bytes([int(escaped[1], 8)])
