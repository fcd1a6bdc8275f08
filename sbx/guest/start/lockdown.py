"""Restrictions that a process inside puts on itself, so that later code in it cannot undo them.

Every process of a jail seals itself: a filter or a Landlock domain covers the one process that asks
for it and its later children, never its siblings.
"""

import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from sbx.linux import landlock, prctl, procfs, seccomp

_FILES_ONLY = (
    landlock.FileRights.EXECUTE
    | landlock.FileRights.MAKE_SOCK
    | landlock.FileRights.MAKE_FIFO
    | landlock.FileRights.MAKE_SYM
    | landlock.FileRights.MAKE_REG
    | landlock.FileRights.MAKE_DIR
    | landlock.FileRights.REFER
)

_CONNECTIONS_SINCE = 9  # the ABI with RESOLVE_UNIX; compared as a number, because flags are slow


# In a directory with a path guard, only the guard creates files. That includes sockets: git
# accepts any name that can be executed as the `refs` of a repository.
_GUARDED = landlock.FileRights.READ


class SealError(Exception):
    """A wall could not be put up; has its name and the reason. Fatal to the jail."""

    def __init__(self, layer: str, error: OSError) -> None:
        super().__init__(f"{layer}: {error}")
        self.layer = layer
        self.errno = error.errno


class _ForbidImports:
    """A finder that raises for every module: see `forbid_imports`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> NoReturn:
        raise ImportError(f"{name} would be imported before the seal")


def refusal(error: BaseException) -> dict[str, Any]:
    """Return the content of the `refused` frame, which reports why a jail ends here."""
    layer = error.layer if isinstance(error, SealError) else "seal"
    number = getattr(error, "errno", None) or 0
    return {"layer": layer, "message": f"{type(error).__name__}: {error}", "errno": number}


@contextmanager
def forbid_imports() -> Iterator[None]:
    """Raise for an import of anything not yet loaded, until this block ends.

    The workspace is mounted and the walls are not all up. A module that is found by accident in a
    place that user code can write would run outside of them.
    """
    finder = _ForbidImports()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def limit(rlimits: Mapping[str, int]) -> None:
    """Set soft and hard limits (setrlimit(2)). NPROC counts in the jail's user namespace by now."""
    for name, value in rlimits.items():
        try:
            which = getattr(resource, f"RLIMIT_{name}")
            _, hard = resource.getrlimit(which)
            lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (lower, lower))
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else OSError(22, str(error))
            raise SealError(f"rlimit {name}", reason) from error


def enter_domain(walls: Mapping[str, Any], *, nested: bool = False) -> int:
    """Restrict the calling process by Landlock, and return the ABI. It must have only one thread.

    A process in a domain enters a nested one. In this way the kernel and each command cannot reach
    each other, while PID 1 keeps its power over both.
    """
    if not walls["landlock"]:
        return 0
    try:
        with ruleset(walls, nested=nested) as domain:
            domain.enter()
            return domain.domain.abi
    except OSError as error:
        raise SealError("landlock", error) from error


def enter_files_only_domain(walls: Mapping[str, Any]) -> None:
    """Enter the kernel's second domain, if the policy forbids processes. It matches the filter.

    No program is executed from anywhere, by any call of Linux. Sockets, FIFOs and links are created
    in no directory; files and directories only in those of `files_only`, because POSIX shared
    memory and semaphores are files of /dev/shm. No TCP port is bound or reached. (Code is still
    mapped: Linux does not count Python's imports as execution.)
    """
    if not walls["files_only"]:
        return
    try:
        with landlock.Ruleset(tcp=True, only=_FILES_ONLY) as domain:
            # A domain without a rule for REFER forbids renames between directories.
            domain.allow("/", landlock.FileRights.REFER)
            for path in walls["files_only"]:
                domain.allow(path, landlock.FileRights.MAKE_REG | landlock.FileRights.MAKE_DIR)
            domain.enter()
    except OSError as error:
        raise SealError("landlock", error) from error


def ruleset(
    walls: Mapping[str, Any], *, scope_signals: bool = True, nested: bool = False
) -> landlock.Ruleset:
    """Return a domain that is not entered yet, with every rule of the walls whose path exists.

    `nested`: the domain around it already restricts connections to Unix sockets. A second
    restriction would separate the processes of one jail.
    """
    domain = landlock.Ruleset(scope_signals=scope_signals, scope_abstract_sockets=True)
    try:
        for path, rights in domain_rules(walls):
            domain.allow(path, rights)
        allow_connections(domain, ("/",) if nested else walls["connect"])
    except BaseException:
        domain.close()
        raise
    return domain


def domain_rules(walls: Mapping[str, Any]) -> list[tuple[str, landlock.FileRights]]:
    """Return the rules of a jail's domain: a path, and the rights there and below."""
    return [
        (path, rights)
        for name, rights in (
            ("read", landlock.FileRights.READ),
            ("write", landlock.FileRights.EDIT),
            ("devices", landlock.FileRights.DEVICE),
            ("guarded", _GUARDED),
        )
        for path in walls[name]
        if os.path.exists(path)
    ]


def allow_connections(domain: landlock.Ruleset, paths: Sequence[str]) -> None:
    """Allow connections to the Unix sockets at and below these paths, if Linux restricts them."""
    if domain.domain.abi < _CONNECTIONS_SINCE:
        return
    for path in paths:
        if os.path.exists(path):
            domain.allow(path, landlock.FileRights.RESOLVE_UNIX)


def add_filter(program_hex: str | None) -> None:
    """Load a prebuilt filter, in addition to the loaded ones; do nothing for None."""
    if program_hex is None:
        return
    try:
        seccomp.install(bytes.fromhex(program_hex))
    except OSError as error:
        raise SealError("seccomp", error) from error


def join_guard(joining: socket.socket, program_hex: str) -> None:
    """Let the path guard decide on the calls of this process and of all its children.

    `joining` leads to the guard. Raise SealError.
    """
    try:
        listener = seccomp.install_with_listener(bytes.fromhex(program_hex))
        socket.send_fds(joining, [b"join"], [listener])
        os.close(listener)
        joining.close()
    except OSError as error:
        raise SealError("path guard", error) from error


def close_all_but(fds: Sequence[int]) -> None:
    """Close every inherited descriptor except 0, 1, 2 and these."""
    kept = sorted({0, 1, 2, *fds})
    for low, high in zip(
        kept, [*kept[1:], resource.getrlimit(resource.RLIMIT_NOFILE)[0]], strict=True
    ):
        os.closerange(low + 1, high)


def check_unprivileged() -> None:
    """Raise SealError if a capability is left, or if no_new_privs is not set."""
    credentials = procfs.credentials("thread-self")
    if credentials.capabilities:
        raise SealError("capabilities", OSError(1, "some are left"))
    if not credentials.no_new_privs:
        raise SealError("no_new_privs", OSError(1, "it is not set"))
    prctl.set_dumpable(True)
