"""The directories of the host that jails of a confined runtime may get with their own uid.

The operator of a service names them and their owners before the service drops its rights. The
broker opens a directory beneath them once for a sandbox, and keeps it open: later orders name
paths, and the broker mounts the open directory. It checks each directory by the rule of the runtime
(`sbx.forbidden_directories`), because code that took over the service could skip that check.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from sbx.errors import Denied
from sbx.forbidden_directories import HostDirectoryFacts, look, place_of, refusal
from sbx.linux import mountinfo, openat2

_WORKSPACE = "/workspace"
_RESOLVE = openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class MappedProjects:
    """The `projects` of `grants`; None grants nothing. The methods raise Denied."""

    def __init__(self, granted: Mapping[str, Any] | None, writable: Sequence[str]) -> None:
        within = granted["within"] if granted is not None else ()
        self._within = {
            top: os.open(top, _DIRECTORY | os.O_NOFOLLOW) for top in within if os.path.isdir(top)
        }
        self._owners = frozenset(granted["owners"]) if granted is not None else frozenset()
        self._writable = tuple(writable)
        self._host = (
            HostDirectoryFacts.from_json(granted["host"])
            if granted is not None
            else HostDirectoryFacts(0)
        )
        self._open_directories: dict[str, tuple[str, int]] = {}

    @contextmanager
    def mapping(self, order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the order for the directory itself, and then keep it open for the sandbox."""
        source, sandbox = order["source"], order["sandbox"]
        fd = self._open(source)
        try:
            if sandbox in self._open_directories:
                raise denied("a directory of this sandbox was mapped already")
            yield {**order, "source": f"/proc/self/fd/{fd}/.", "shown": source}
            self._open_directories[sandbox], fd = (source, fd), -1
        finally:
            if fd >= 0:
                os.close(fd)

    def opened(self, sandbox: Any, source: Any, target: Any, stack: ExitStack) -> str:
        """Return a path of the mapped directory, or of a file or directory below it, which the jail
        has at the same relative path in /workspace. It is valid while `stack` is open."""
        top, fd = self._open_directories.get(sandbox, ("", -1))
        if fd < 0 or not isinstance(source, str) or not isinstance(target, str):
            raise denied("no directory of this sandbox was mapped")
        below = source.removeprefix(top)
        if source == top and target == _WORKSPACE:
            return f"/proc/self/fd/{fd}/."
        if source == below or target != f"{_WORKSPACE}{below}" or not below.startswith("/"):
            raise denied(f"{source} is not mapped at {target}")
        parent, _, name = below[1:].rpartition("/")
        if name in ("", ".", ".."):
            raise denied(f"{source} is not a plain path")
        above = _beneath(fd, parent or ".")
        stack.callback(os.close, above)
        return f"/proc/self/fd/{above}/{name}"

    def forget(self, sandbox: Any) -> None:
        _, fd = self._open_directories.pop(sandbox, ("", -1))
        if fd >= 0:
            os.close(fd)

    def _open(self, source: Any) -> int:
        if not isinstance(source, str) or os.path.normpath(source) != source:
            raise denied("that is not a plain path of a directory")
        for top, opened in self._within.items():
            if source == top or source.startswith(f"{top.rstrip('/')}/"):
                fd = _beneath(opened, source[len(top) :].strip("/") or ".")
                try:
                    self._check(fd)
                except BaseException:
                    os.close(fd)
                    raise
                return fd
        raise denied(
            f"{source} is in none of the directories that may hold projects (project_dirs)"
        )

    def _check(self, fd: int) -> None:
        """Check the open directory by its current path and mounts."""
        mounts = mountinfo.read()
        directory = look(fd, mounts)
        path, uid = directory.place.path, directory.owner
        if uid not in self._owners:
            raise denied(f"{path} belongs to uid {uid}, which project_owners does not name")
        writable = tuple(place_of(path, mounts) for path in self._writable)
        host = replace(self._host, private=(*self._host.private, *writable))
        if (reason := refusal(directory, host)) is not None:
            raise denied(f"{path} cannot be shown to a sandbox: {reason}")


def denied(why: str) -> Denied:
    return Denied(
        f"the broker refuses an order that no policy of this service allowed at its start: {why}",
        code="not_granted",
        hint="after a change of policies, start the service again",
    )


def _beneath(top: int, relative: str) -> int:
    try:
        return openat2.openat2(top, os.fsencode(relative), _DIRECTORY, resolve=_RESOLVE)
    except OSError as error:
        raise denied(f"{relative} cannot be shown: {error.strerror}") from error
