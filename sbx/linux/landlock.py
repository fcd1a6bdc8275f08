"""landlock(7): a process gives up, for itself and its children, what the rules do not name.

    ABI 1  linux 5.13  files              ABI 5  6.10  IOCTL_DEV
    ABI 2  linux 5.19  REFER              ABI 6  6.12  scopes: signals, abstract Unix sockets
    ABI 3  linux 6.2   TRUNCATE           ABI 7  6.15  choice of what the audit log hears
    ABI 4  linux 6.7   TCP ports          ABI 9  7.1   RESOLVE_UNIX: Unix sockets by their path

ABI 8 (linux 7.0) adds nothing that is used here, and a newer ABI is used as 9. Rights are judged
when a file is opened, so a descriptor that is held already keeps what it could do. Rules only add:
nothing below an allowed directory can be taken away again. A rule holds for the file or directory
that was there when it was made, and *not* for what is mounted over or below it later, so restrict
after the last mount. chdir(2) and stat(2) are never restricted. A process in a domain can ptrace
only processes in the same domain or below it.
"""

import ctypes
import functools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntFlag
from typing import NamedTuple, Self

from sbx.linux import libc

_NR_CREATE_RULESET, _NR_ADD_RULE, _NR_RESTRICT_SELF = 444, 445, 446  # on every architecture
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_LOG_SAME_EXEC_OFF, _LOG_SUBDOMAINS_OFF = 1, 4


class Files(IntFlag):
    """LANDLOCK_ACCESS_FS_*: what may be done to files beneath a path."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13  # rename and link between directories; never possible under ABI 1
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15
    #: connect(2) and sendmsg(2) to a socket by its path. A socket that was made in the domain needs
    #: no rule.
    RESOLVE_UNIX = 1 << 16

    READ = EXECUTE | READ_FILE | READ_DIR
    #: everything but devices: for a directory that a hostile process may call its own
    EDIT = (
        READ | WRITE_FILE | TRUNCATE | REFER | REMOVE_DIR | REMOVE_FILE
        | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
    )  # fmt: skip
    #: for a device node
    DEVICE = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV


class Tcp(IntFlag):
    """LANDLOCK_ACCESS_NET_*: what may be done with a TCP port. UDP, MPTCP, raw: not covered."""

    BIND = 1 << 0
    CONNECT = 1 << 1


class Scope(IntFlag):
    """LANDLOCK_SCOPE_*: what stays within the domain."""

    ABSTRACT_UNIX_SOCKET = 1 << 0
    SIGNAL = 1 << 1


class Domain(NamedTuple):
    """What is in force: a right that is not in `handled` is not restricted."""

    abi: int
    handled: Files
    handled_tcp: Tcp
    scoped: Scope


_ADDED_BY_ABI = {2: Files.REFER, 3: Files.TRUNCATE, 5: Files.IOCTL_DEV, 9: Files.RESOLVE_UNIX}
_FOR_NON_DIRECTORIES = int(
    Files.EXECUTE
    | Files.WRITE_FILE
    | Files.READ_FILE
    | Files.TRUNCATE
    | Files.IOCTL_DEV
    | Files.RESOLVE_UNIX
)


class _Ruleset(ctypes.Structure):
    _fields_ = [
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _NetPort(ctypes.Structure):
    _fields_ = [("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64)]


@functools.cache
def abi() -> int:
    """The Landlock version of this linux; 0 where it is missing or switched off."""
    try:
        return libc.syscall(
            "landlock_create_ruleset", _NR_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION
        )
    except OSError:
        return 0


def supported() -> bool:
    return abi() > 0


def handled_by(version: int) -> Files:
    """The rights that a linux with ABI `version` can take away."""
    if version < 1:
        return Files(0)
    rights = Files(Files.REFER - 1)
    for since, right in _ADDED_BY_ABI.items():
        if version >= since:
            rights |= right
    return rights


class Ruleset:
    """A domain in the making: rules are added one by one, and `enter` puts them in force.

    What this linux is too old for is left out, and missing from `domain`: a caller that needs it
    compares. `tcp` handles TCP ports, which is then refused but for those allowed. Raises OSError:
    ENOSYS or EOPNOTSUPP without Landlock. To be closed.
    """

    def __init__(
        self,
        *,
        scope_signals: bool = False,
        scope_abstract_sockets: bool = False,
        tcp: bool = False,
        only: Files | None = None,
        made: int | None = None,
    ) -> None:
        """`only`: the rights it is to be about, all others stay as they are (save REFER, which any
        domain takes away). `made`: the fd of one that another process made with the same words, to
        go on with."""
        self.domain = domain = _obtainable(
            tcp=tcp, signals=scope_signals, abstract_sockets=scope_abstract_sockets
        )
        if only is not None:
            self.domain = domain = domain._replace(handled=domain.handled & only)
        self._handled = int(domain.handled)  # an IntFlag takes 5 µs and 20 pages for an `&`
        if made is not None:
            self._fd = made
            return
        attributes = _Ruleset(domain.handled, domain.handled_tcp, domain.scoped)
        self._fd = libc.syscall(
            "landlock_create_ruleset",
            _NR_CREATE_RULESET,
            ctypes.byref(attributes),
            ctypes.sizeof(attributes),  # an older linux takes the longer one if what it misses is 0
            0,
        )

    def fileno(self) -> int:
        return self._fd

    def allow(self, where: str | int, rights: Files) -> None:
        """Allow this to the file or directory that is at `where`, a path or an fd, and below it.

        Rights that only a directory can have are left out for anything else. ENOENT for a path that
        is not there.
        """
        _allow_beneath(self._fd, where, int(rights) & self._handled)

    def allow_tcp(self, port: int, rights: Tcp) -> None:
        if self.domain.handled_tcp:
            _add_rule(self._fd, _RULE_NET_PORT, _NetPort(rights, port))

    def enter(self, *, only_this_thread: bool = False) -> None:
        """Leave this process, and all it starts, only what was allowed. Cannot be undone.

        Must be called with one thread, since others would stay free: RuntimeError else, unless
        `only_this_thread` says that this is meant. EPERM without no_new_privs.
        """
        if not only_this_thread:
            _demand_one_thread()
        # A jail must not be able to fill the host's audit log with what it was denied.
        quiet = _LOG_SAME_EXEC_OFF | _LOG_SUBDOMAINS_OFF if self.domain.abi >= 7 else 0
        libc.syscall("landlock_restrict_self", _NR_RESTRICT_SELF, self._fd, quiet)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def restrict(
    rules: Sequence[tuple[str | int, Files]],
    *,
    scope_signals: bool = False,
    scope_abstract_sockets: bool = False,
    tcp: Sequence[tuple[int, Tcp]] | None = None,
) -> Domain:
    """Make a `Ruleset` of these rules and enter it; `tcp` None leaves TCP alone. Raises as it
    does."""
    _demand_one_thread()
    with Ruleset(
        scope_signals=scope_signals,
        scope_abstract_sockets=scope_abstract_sockets,
        tcp=tcp is not None,
    ) as ruleset:
        for where, rights in rules:
            ruleset.allow(where, rights)
        for port, allowed in tcp or ():
            ruleset.allow_tcp(port, allowed)
        ruleset.enter()
        return ruleset.domain


@functools.cache  # flags are slow: 40 µs and 20 pages in a fork
def _obtainable(*, tcp: bool, signals: bool, abstract_sockets: bool) -> Domain:
    """What of that this linux can enforce, and all the file rights it knows."""
    version = abi()
    scoped = Scope.SIGNAL if signals else Scope(0)
    scoped |= Scope.ABSTRACT_UNIX_SOCKET if abstract_sockets else Scope(0)
    return Domain(
        abi=version,
        handled=handled_by(version),
        handled_tcp=Tcp.BIND | Tcp.CONNECT if tcp and version >= 4 else Tcp(0),
        scoped=scoped if version >= 6 else Scope(0),
    )


def _allow_beneath(ruleset: int, where: str | int, rights: int) -> None:
    with _opened(where) as fd:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FOR_NON_DIRECTORIES  # linux answers EINVAL to the others
        if rights:  # and ENOMSG to none
            _add_rule(ruleset, _RULE_PATH_BENEATH, _PathBeneath(rights, fd))


def _add_rule(ruleset: int, kind: int, rule: ctypes.Structure) -> None:
    libc.syscall("landlock_add_rule", _NR_ADD_RULE, ruleset, kind, ctypes.byref(rule), 0)


@contextmanager
def _opened(where: str | int) -> Iterator[int]:
    if isinstance(where, int):
        yield where
        return
    fd = os.open(where, os.O_PATH | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _demand_one_thread() -> None:
    others = os.stat("/proc/self/task").st_nlink - 3
    if others:
        raise RuntimeError(f"Landlock would not hold the {others} other threads of this process")
