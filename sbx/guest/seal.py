"""What a process inside does to itself so that no code it runs later can undo it.

Every process of a jail seals itself: a filter or a Landlock domain covers the one process that asks
for it and what it forks from then on, never its siblings.
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
    landlock.Files.EXECUTE
    | landlock.Files.MAKE_SOCK
    | landlock.Files.MAKE_FIFO
    | landlock.Files.MAKE_SYM
    | landlock.Files.MAKE_REG
    | landlock.Files.MAKE_DIR
    | landlock.Files.REFER
)

_CONNECTIONS_SINCE = 9  # the ABI with RESOLVE_UNIX; compared as a number, since flags are slow


# In a directory that a path guard serves nothing is made without it. That includes sockets: git
# takes any name that can be executed for the `refs` of a repository.
_GUARDED = landlock.Files.READ


class SealError(Exception):
    """A wall that could not be put up, with its name and the reason; fatal to the jail."""

    def __init__(self, layer: str, error: OSError) -> None:
        super().__init__(f"{layer}: {error}")
        self.layer = layer
        self.errno = error.errno


class _ForbidImports:
    """A finder that finds nothing and says so loudly: see `forbid_imports`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> NoReturn:
        raise ImportError(f"{name} would be imported before the seal")


def refusal(error: BaseException) -> dict[str, Any]:
    """The content of the `refused` frame that tells the runtime why a jail ends here."""
    layer = error.layer if isinstance(error, SealError) else "seal"
    number = getattr(error, "errno", None) or 0
    return {"layer": layer, "message": f"{type(error).__name__}: {error}", "errno": number}


@contextmanager
def forbid_imports() -> Iterator[None]:
    """Until this block ends an import of anything not yet loaded raises.

    The workspace is mounted and the walls are not all up: a module found by accident in a place
    that user code can write would run outside them.
    """
    ban = _ForbidImports()
    sys.meta_path.insert(0, ban)
    try:
        yield
    finally:
        sys.meta_path.remove(ban)


def limit(rlimits: Mapping[str, int]) -> None:
    """setrlimit(2), soft and hard alike. NPROC counts in the jail's own user namespace by now."""
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
    """Restrict the calling process, which must have one thread, by Landlock; returns the ABI.

    A process that is in a domain already enters one nested in it: that is how the kernel and each
    command come to be out of each other's reach while PID 1 keeps its power over both.
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
    """The kernel's second domain, where the policy takes processes away: made to match the filter.

    No program is executed from anywhere, whatever calls of linux do that; sockets, FIFOs and links
    are made in no directory, and files and directories in those of `files_only` alone: POSIX shared
    memory and semaphores are files of /dev/shm. No TCP port is bound or reached. (Code is still
    mapped: what Python imports is not executed in linux's sense.)
    """
    if not walls["files_only"]:
        return
    try:
        with landlock.Ruleset(tcp=True, only=_FILES_ONLY) as domain:
            # A domain that says nothing of REFER takes renames between directories away.
            domain.allow("/", landlock.Files.REFER)
            for path in walls["files_only"]:
                domain.allow(path, landlock.Files.MAKE_REG | landlock.Files.MAKE_DIR)
            domain.enter()
    except OSError as error:
        raise SealError("landlock", error) from error


def ruleset(
    walls: Mapping[str, Any], *, scope_signals: bool = True, nested: bool = False
) -> landlock.Ruleset:
    """A domain in the making, with every rule of the walls that has its path by now.

    `nested`: the domain around it restricts connections to Unix sockets already. A second
    restriction would keep the processes of one jail apart.
    """
    made = landlock.Ruleset(scope_signals=scope_signals, scope_abstract_sockets=True)
    try:
        for path, rights in domain_rules(walls):
            made.allow(path, rights)
        allow_connections(made, ("/",) if nested else walls["connect"])
    except BaseException:
        made.close()
        raise
    return made


def domain_rules(walls: Mapping[str, Any]) -> list[tuple[str, landlock.Files]]:
    """What the domain of a jail allows: a path, and what may be done there and below."""
    return [
        (path, rights)
        for name, rights in (
            ("read", landlock.Files.READ),
            ("write", landlock.Files.EDIT),
            ("devices", landlock.Files.DEVICE),
            ("guarded", _GUARDED),
        )
        for path in walls[name]
        if os.path.exists(path)
    ]


def allow_connections(domain: landlock.Ruleset, paths: Sequence[str]) -> None:
    """Allow connections to the Unix sockets at these paths and below, where linux asks for it."""
    if domain.domain.abi < _CONNECTIONS_SINCE:
        return
    for path in paths:
        if os.path.exists(path):
            domain.allow(path, landlock.Files.RESOLVE_UNIX)


def add_filter(program_hex: str | None) -> None:
    """Load a prebuilt filter, on top of those that are loaded; None is none."""
    if program_hex is None:
        return
    try:
        seccomp.install(bytes.fromhex(program_hex))
    except OSError as error:
        raise SealError("seccomp", error) from error


def join_guard(joining: socket.socket, program_hex: str) -> None:
    """Let the path guard decide on the calls of this process and of all that it starts.

    `joining` leads to the guard. Raises SealError.
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
    """No capability is left, and no_new_privs is set: see for ourselves, once."""
    found = procfs.credentials("thread-self")
    if found.capabilities:
        raise SealError("capabilities", OSError(1, "some are left"))
    if not found.no_new_privs:
        raise SealError("no_new_privs", OSError(1, "it is not set"))
    prctl.set_dumpable(True)
