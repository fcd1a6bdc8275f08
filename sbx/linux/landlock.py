"""landlock(7): a process gives up every access that its rules do not allow, also for its children.

    ABI 1  Linux 5.13  files              ABI 5  6.10  IOCTL_DEV
    ABI 2  Linux 5.19  REFER              ABI 6  6.12  scopes: signals, abstract Unix sockets
    ABI 3  Linux 6.2   TRUNCATE           ABI 7  6.15  flags that select audit log records
    ABI 4  Linux 6.7   TCP ports          ABI 9  7.1   RESOLVE_UNIX: Unix sockets by their path

ABI 8 (Linux 7.0) adds nothing that sbx uses. A newer ABI is used as ABI 9.

Linux checks rights when a file is opened, so an open descriptor keeps its rights. Rules only add
rights: a rule cannot remove a right below an allowed directory. A rule applies to the file or
directory that existed when the rule was added. It does *not* apply to later mounts over or below
it, so restrict the process after the last mount. Landlock never restricts chdir(2) and stat(2). A
process in a domain can ptrace only processes in the same domain or in a nested one.
"""

import ctypes
import functools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntFlag
from typing import NamedTuple

from sbx.linux import libc
from sbx.linux.descriptors import OwnedDescriptor

_NR_CREATE_RULESET, _NR_ADD_RULE, _NR_RESTRICT_SELF = 444, 445, 446  # on every architecture
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_LOG_SAME_EXEC_OFF, _LOG_SUBDOMAINS_OFF = 1, 4


class FileRights(IntFlag):
    """LANDLOCK_ACCESS_FS_*: actions on the files beneath a path."""

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
    #: connect(2) and sendmsg(2) to a socket by its path. A socket that was created in the domain
    #: needs no rule.
    RESOLVE_UNIX = 1 << 16

    READ = EXECUTE | READ_FILE | READ_DIR
    #: everything except devices: for a directory that a hostile process owns
    EDIT = (
        READ | WRITE_FILE | TRUNCATE | REFER | REMOVE_DIR | REMOVE_FILE
        | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
    )  # fmt: skip
    #: for a device node
    DEVICE = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV


class Tcp(IntFlag):
    """LANDLOCK_ACCESS_NET_*: actions on a TCP port. UDP, MPTCP and raw sockets are not covered."""

    BIND = 1 << 0
    CONNECT = 1 << 1


class LandlockScope(IntFlag):
    """LANDLOCK_SCOPE_*: mechanisms that cannot reach processes outside the domain."""

    ABSTRACT_UNIX_SOCKET = 1 << 0
    SIGNAL = 1 << 1


class Domain(NamedTuple):
    """The restrictions in force. A right that is not in `handled` is not restricted."""

    abi: int
    handled: FileRights
    handled_tcp: Tcp
    scoped: LandlockScope


_ADDED_BY_ABI = {
    2: FileRights.REFER,
    3: FileRights.TRUNCATE,
    5: FileRights.IOCTL_DEV,
    9: FileRights.RESOLVE_UNIX,
}
_FOR_NON_DIRECTORIES = int(
    FileRights.EXECUTE
    | FileRights.WRITE_FILE
    | FileRights.READ_FILE
    | FileRights.TRUNCATE
    | FileRights.IOCTL_DEV
    | FileRights.RESOLVE_UNIX
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
    """Return the Landlock version of this Linux; 0 if Landlock is missing or switched off."""
    try:
        return libc.syscall(
            "landlock_create_ruleset", _NR_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION
        )
    except OSError:
        return 0


def supported() -> bool:
    return abi() > 0


def handled_by(version: int) -> FileRights:
    """Return the rights that Linux with ABI `version` can restrict."""
    if version < 1:
        return FileRights(0)
    rights = FileRights(FileRights.REFER - 1)
    for minimum, right in _ADDED_BY_ABI.items():
        if version >= minimum:
            rights |= right
    return rights


class Ruleset(OwnedDescriptor):
    """A domain that is being built. Add rules one by one; `enter` puts them in force.

    Restrictions that this Linux is too old for are left out, and are missing from `domain`. A
    caller that requires them must compare. With `tcp`, every TCP port is refused except the allowed
    ones. Raise OSError without Landlock: ENOSYS or EOPNOTSUPP. The caller must close the ruleset.
    """

    def __init__(
        self,
        *,
        scope_signals: bool = False,
        scope_abstract_sockets: bool = False,
        tcp: bool = False,
        only: FileRights | None = None,
        ruleset_fd: int | None = None,
    ) -> None:
        """Create a ruleset, or continue with one that another process created.

        `only` is the set of rights that the ruleset handles. All other rights stay unrestricted,
        except REFER, which every domain restricts. `ruleset_fd` is the fd of a ruleset that another
        process created with the same arguments.
        """
        self.domain = domain = _obtainable(
            tcp=tcp, signals=scope_signals, abstract_sockets=scope_abstract_sockets
        )
        if only is not None:
            self.domain = domain = domain._replace(handled=domain.handled & only)
        self._handled = int(domain.handled)  # an IntFlag takes 5 µs and 20 pages for an `&`
        if ruleset_fd is not None:
            super().__init__(ruleset_fd)
            return
        attributes = _Ruleset(domain.handled, domain.handled_tcp, domain.scoped)
        fd = libc.syscall(
            "landlock_create_ruleset",
            _NR_CREATE_RULESET,
            ctypes.byref(attributes),
            ctypes.sizeof(attributes),  # an older Linux accepts more fields if they are 0
            0,
        )
        super().__init__(fd)

    def fileno(self) -> int:
        return self.fd

    def allow(self, where: str | int, rights: FileRights) -> None:
        """Allow `rights` for the file or directory at `where` (a path or an fd), and below it.

        Rights that apply only to directories are left out for other files. Raise OSError ENOENT if
        the path does not exist.
        """
        _allow_beneath(self.fd, where, int(rights) & self._handled)

    def allow_tcp(self, port: int, rights: Tcp) -> None:
        if self.domain.handled_tcp:
            _add_rule(self.fd, _RULE_NET_PORT, _NetPort(rights, port))

    def enter(self, *, only_this_thread: bool = False) -> None:
        """Restrict this process, and all processes that it starts, to the allowed access.
        Irreversible.

        Raise RuntimeError if the process has other threads, because they would stay unrestricted.
        `only_this_thread` skips this check. Raise OSError EPERM without no_new_privs.
        """
        if not only_this_thread:
            _demand_one_thread()
        # A jail must not be able to fill the host's audit log with its denied accesses.
        quiet = _LOG_SAME_EXEC_OFF | _LOG_SUBDOMAINS_OFF if self.domain.abi >= 7 else 0
        libc.syscall("landlock_restrict_self", _NR_RESTRICT_SELF, self.fd, quiet)


def restrict(
    rules: Sequence[tuple[str | int, FileRights]],
    *,
    scope_signals: bool = False,
    scope_abstract_sockets: bool = False,
    tcp: Sequence[tuple[int, Tcp]] | None = None,
) -> Domain:
    """Create a `Ruleset` from these rules and enter it. `tcp` None leaves TCP unrestricted.

    Raise the same errors as `Ruleset`.
    """
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
    """Return the requested restrictions that this Linux can enforce, with all its file rights."""
    version = abi()
    scoped = LandlockScope.SIGNAL if signals else LandlockScope(0)
    scoped |= LandlockScope.ABSTRACT_UNIX_SOCKET if abstract_sockets else LandlockScope(0)
    return Domain(
        abi=version,
        handled=handled_by(version),
        handled_tcp=Tcp.BIND | Tcp.CONNECT if tcp and version >= 4 else Tcp(0),
        scoped=scoped if version >= 6 else LandlockScope(0),
    )


def _allow_beneath(ruleset: int, where: str | int, rights: int) -> None:
    with _opened(where) as fd:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FOR_NON_DIRECTORIES  # Linux returns EINVAL for the others
        if rights:  # Linux returns ENOMSG for an empty set
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
        raise RuntimeError(
            f"Landlock would not restrict the {others} other threads of this process"
        )
