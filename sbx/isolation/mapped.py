"""The directories of the host that the jails of a confined runtime may be shown as their own.

The operator of a service names them and their owners before the service drops its rights. The
broker opens each one beneath them, once for a sandbox, and holds it open: later orders name paths,
and the broker mounts what it holds. It judges each directory by the rule that the runtime uses
(`sbx.forbidden_directories`), since code that took over the service could leave the check out.
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
    """Made of the `projects` of `grants`; None grants nothing. Its methods raise Denied."""

    def __init__(self, told: Mapping[str, Any] | None, writable: Sequence[str]) -> None:
        within = told["within"] if told is not None else ()
        self._within = {
            top: os.open(top, _DIRECTORY | os.O_NOFOLLOW) for top in within if os.path.isdir(top)
        }
        self._owners = frozenset(told["owners"]) if told is not None else frozenset()
        self._writable = tuple(writable)
        self._host = (
            HostDirectoryFacts.from_json(told["host"])
            if told is not None
            else HostDirectoryFacts(0)
        )
        self._held: dict[str, tuple[str, int]] = {}

    @contextmanager
    def mapping(self, order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the order for the directory itself, and hold it for the sandbox afterwards."""
        source, sandbox = order["source"], order["sandbox"]
        fd = self._open(source)
        try:
            if sandbox in self._held:
                raise denied("a directory of this sandbox was mapped already")
            yield {**order, "source": f"/proc/self/fd/{fd}/.", "shown": source}
            self._held[sandbox], fd = (source, fd), -1
        finally:
            if fd >= 0:
                os.close(fd)

    def opened(self, sandbox: Any, source: Any, target: Any, held: ExitStack) -> str:
        """Return a path that leads to the mapped directory, or to a file or directory below it, as
        long as `held` is: what is shown in /workspace at the same relative path."""
        top, fd = self._held.get(sandbox, ("", -1))
        if fd < 0 or not isinstance(source, str) or not isinstance(target, str):
            raise denied("no directory of this sandbox was mapped")
        below = source.removeprefix(top)
        if source == top and target == _WORKSPACE:
            return f"/proc/self/fd/{fd}/."
        if source == below or target != f"{_WORKSPACE}{below}" or not below.startswith("/"):
            raise denied(f"{source} is not mapped at {target}")
        parent, _, name = below[1:].rpartition("/")
        if name in ("", ".", ".."):
            raise denied(f"{source} is no plain path")
        above = _beneath(fd, parent or ".")
        held.callback(os.close, above)
        return f"/proc/self/fd/{above}/{name}"

    def forget(self, sandbox: Any) -> None:
        """Let go of the directory of a sandbox that is dropped."""
        _, fd = self._held.pop(sandbox, ("", -1))
        if fd >= 0:
            os.close(fd)

    def _open(self, source: Any) -> int:
        if not isinstance(source, str) or os.path.normpath(source) != source:
            raise denied("that is no plain path of a directory")
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
        """By the path and the mounts that the open directory has now."""
        mounts = mountinfo.read()
        directory = look(fd, mounts)
        path, uid = directory.place.path, directory.owner
        if uid not in self._owners:
            raise denied(f"{path} belongs to uid {uid}, whom project_owners does not name")
        writable = tuple(place_of(one, mounts) for one in self._writable)
        host = replace(self._host, private=(*self._host.private, *writable))
        if (reason := refusal(directory, host)) is not None:
            raise denied(f"{path} cannot be shown to a sandbox: {reason}")


def denied(why: str) -> Denied:
    return Denied(
        f"the broker refuses what no policy of this service meant at its start: {why}",
        code="not_granted",
        hint="where a policy was changed or added, start the service again",
    )


def _beneath(top: int, relative: str) -> int:
    try:
        return openat2.openat2(top, os.fsencode(relative), _DIRECTORY, resolve=_RESOLVE)
    except OSError as error:
        raise denied(f"{relative} cannot be shown: {error.strerror}") from error
