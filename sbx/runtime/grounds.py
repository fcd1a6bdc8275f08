"""From where a service lets directories of its host be mounted: whoever asks comes by HTTP.

Of a service that dropped root's rights the broker looks at it again
(`sbx.isolation.broker.allowlist`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sbx import errors
from sbx.linux import openat2

_HOW = os.O_PATH | os.O_DIRECTORY
_RESOLVE = openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS


@dataclass(frozen=True, slots=True)
class Grounds:
    """`within`: directories of which, and of what lies below them, some may be mounted.
    `writable`: whether one may be mounted to be written to."""

    within: Sequence[Path]
    writable: bool

    def check(self, source: Path, *, read_only: bool) -> None:
        """By its path alone. Raises Denied `not_granted`."""
        self._top_of(source)
        if not read_only and not self.writable:
            raise errors.Denied(
                "a service that was started as root mounts directories read-only",
                code="not_granted",
                hint="leave --write (read_only = false) out, or serve as the directory's owner",
            )

    def open(self, source: Path) -> int:
        """An O_PATH descriptor of it, the caller's to close. No symlink on the way is followed:
        whoever may write in one of the directories does not choose what is mounted. Raises Denied
        `not_granted`, OSError."""
        top = self._top_of(source)
        outer = os.open(top, _HOW | os.O_CLOEXEC)
        try:
            below = os.fsencode(source.relative_to(top))
            return openat2.openat2(outer, below, _HOW, resolve=_RESOLVE)
        finally:
            os.close(outer)

    def _top_of(self, source: Path) -> Path:
        for top in self.within:
            if source.is_relative_to(top):
                return top
        said = ", ".join(map(str, self.within)) or "none"
        raise errors.Denied(
            f"{source} lies in none of the directories that this service mounts: {said}",
            code="not_granted",
            hint="name it in the setting mount_dirs (SBX_MOUNT_DIRS, sbx serve --mount-dirs)"
            " and start the service again",
        )
