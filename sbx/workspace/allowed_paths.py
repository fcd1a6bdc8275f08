"""Decide which host directories a sandbox may see: one rule for every entry point.

    look (directory, host) ─► facts ─► refusal (pure) ─► a reason, or None ─► check raises

The rule refuses `/`, homes and the directories above them, the hidden directories of a home, the
files of sbx itself, the system's directories, and directories in the homes of other users.
Workspaces, projects, notebooks, host mode, uploads and attachments all call `check`. A read-only
mount (uploads, an attachment) may show a system directory, because the code inside cannot change
it; it may not show a home, the files of sbx, or a tree with the host's processes and sockets.

A symlink or a bind mount does not hide a home: `check` compares real paths, inodes, and the place
of each directory in its file system, also for the mounts below the directory.
"""

import os
import pwd
import stat
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sbx.errors import Denied
from sbx.workspace.host_directory import own_code

Identity = tuple[int, int]  # device and inode
Source = tuple[str, str]  # the device of a file system, and a path from the root of that

# These trees belong to the operating system. A program of the host may execute or obey any file in
# them. The second table lists the places in these trees where people do keep projects.
SYSTEM_TREES = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr"),
    *("/var/backups", "/var/cache", "/var/lib", "/var/log", "/var/mail", "/var/spool"),
)
_PROJECTS_BELOW = ("/dev/shm", "/run/media", "/usr/src", "/usr/local/src")  # noqa: S108
# Only these directories themselves are refused: the projects of many users are below them, and in
# the temporary ones the sockets of other programs.
_SYSTEM_TOPS = (
    *("/home", "/media", "/mnt", "/opt", "/srv", "/tmp", "/var", "/var/tmp"),  # noqa: S108
    *_PROJECTS_BELOW,
)
# Also refused read-only: processes with their environment, devices, and sockets of daemons.
_LIVE_TREES = ("/dev", "/proc", "/run", "/sys")

# A hidden directory of a home holds credentials (.ssh, .aws), settings that programs obey (.config)
# or programs that are executed (.local/bin, .cargo/bin, .cache/pre-commit). A list of such names
# would never be complete, so all of them are refused. Exceptions: coding agents keep checkouts in
# ~/.NAME/worktrees, and a temporary directory (TMPDIR) may be in ~/.cache.
_WORKTREES = "worktrees"
_CACHE = ".cache"  # a cache of models or data sets may be shown read-only
_ON_PATH = "bin"  # ~/bin is on the PATH of a login shell where it exists

_NO_LOGIN = ("nologin", "false", "sync", "shutdown", "halt")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory or a socket of the host, by its real path and by its file system."""

    path: str
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Home:
    """`identities`: of the home and of each directory above it. `login`: whether the account has a
    shell."""

    place: Place
    user: str
    uid: int
    login: bool = True
    identities: frozenset[Identity] = frozenset()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """`private`: data, configuration and sockets of sbx. `code`: files that decide how sandboxes
    run. `caller`: the uid of this process."""

    caller: int
    homes: tuple[Home, ...] = ()
    private: tuple[Place, ...] = ()
    code: tuple[Place, ...] = ()
    temporary: str = "/tmp"  # noqa: S108


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """`mounts`: the sources of the mounts below the directory. `shielded`: relative paths that the
    sandbox mounts read-only."""

    place: Place
    owner: int
    identity: Identity | None = None
    mounts: tuple[Source, ...] = ()
    shielded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnPaths:
    """The paths of sbx: see HostFacts. The Python that runs this process counts as `code` too."""

    private: tuple[Path, ...] = ()
    code: tuple[Path, ...] = ()


class Check(Protocol):
    """Raise Denied for a host directory that no sandbox may see, by its path or descriptor."""

    def __call__(self, directory: int | Path, /, *, read_only: bool) -> None: ...


def refusal(directory: DirectoryFacts, host: HostFacts, *, read_only: bool = False) -> str | None:
    """Return the reason why no sandbox may see this directory, or None. Pure."""
    path = directory.place.path
    if path == "/":
        return "it is the whole host"
    for home in host.homes:
        if _is_below(home.place.path, path) or _holds(directory, home.place):
            is_home = path == home.place.path
            return f"it {'is' if is_home else 'contains'} the home of {home.user}" + (
                "" if is_home else f", {home.place.path}"
            )
        if directory.identity in home.identities:
            return f"it is, or contains, the home of {home.user} by another path"
    for place in (*host.private, *(() if read_only else host.code)):
        why = "belongs to sbx" if place in host.private else "decides what sbx runs on the host"
        if _below(place, directory.place) is not None:
            return f"it is in {place.path}, which {why}"
        if _holds(directory, place) and not _is_shielded(place, directory):
            return f"it contains {place.path}, which {why}"
    return _refusal_in_homes(directory, host, read_only) or _refusal_in_system(
        directory, host, read_only
    )


def _refusal_in_homes(directory: DirectoryFacts, host: HostFacts, read_only: bool) -> str | None:
    path = directory.place.path
    for home in host.homes:
        below = _below(home.place, directory.place)
        if not below or home.place.path == "/":
            continue
        first, *rest = below
        if first == _ON_PATH and not read_only:
            return f"it is in {home.place.path}/{first}, whose programs {home.user} executes"
        hidden = f"{home.place.path}/{first}"
        if first.startswith(".") and not (
            (rest[:1] == [_WORKTREES] and len(rest) > 1)
            or (read_only and first == _CACHE and rest)
            or (_is_below(host.temporary, hidden) and _is_strictly_below(path, host.temporary))
        ):
            return (
                f"it is {'' if not rest else 'in '}{hidden}, and a hidden directory of a home holds"
                " credentials or settings"
            )
        # Root may act for every user; the code inside still has another uid. A read-only mount
        # shows what the user may read, or what the operator named.
        if not read_only and host.caller not in (0, home.uid, directory.owner):
            return f"it is in the home of {home.user}, and belongs to another user"
    return None


def _refusal_in_system(directory: DirectoryFacts, host: HostFacts, read_only: bool) -> str | None:
    path = directory.place.path
    if path in _SYSTEM_TOPS:
        return "it is a directory of the system that several users or programs share"
    if any(_is_below(path, top) for top in _PROJECTS_BELOW):
        return None
    # Some services have their home in the system (/var/lib/jenkins), and projects below it.
    if any(_is_below(path, home.place.path) and _is_apart(home) for home in host.homes):
        return None
    for top in _LIVE_TREES if read_only else SYSTEM_TREES:
        if _is_below(path, top):
            return f"it is in {top}, a directory of the system"
    return None


def _is_apart(home: Home) -> bool:
    return home.login and home.place.path.count("/") >= 2


def _is_below(path: str, top: str) -> bool:
    """Return whether `path` is `top` or below it."""
    return path == top or path.startswith(f"{top.rstrip('/')}/")


def _is_strictly_below(path: str, top: str) -> bool:
    return path != top and _is_below(path, top)


def _below(top: Place, place: Place) -> list[str] | None:
    """Return the components of `place` below `top`, by path or by file system; None if it is
    elsewhere."""
    if _is_below(place.path, top.path):
        return _components(place.path[len(top.path) :])
    if top.source is None or place.source is None or top.source[0] != place.source[0]:
        return None
    if _is_below(place.source[1], top.source[1]):
        return _components(place.source[1][len(top.source[1]) :])
    return None


def _components(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _holds(directory: DirectoryFacts, place: Place) -> bool:
    if _below(directory.place, place) is not None:
        return True
    return place.source is not None and any(
        device == place.source[0] and _is_below(place.source[1], top)
        for device, top in directory.mounts
    )


def _is_shielded(place: Place, directory: DirectoryFacts) -> bool:
    top = directory.place.path
    return any(_is_below(place.path, f"{top}/{name}") for name in directory.shielded)


# -- facts -----------------------------------------------------------------------------------------


def check(directory: int | str | Path, own: OwnPaths, *, read_only: bool = False) -> None:
    """Raise Denied `directory_forbidden` for a directory that no sandbox may see.

    `directory` is a path or an open descriptor. A path that cannot be opened passes: the caller's
    own open reports it. Reads the disk and the accounts: call it in a thread.
    """
    if not isinstance(directory, int):
        try:
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError):
            return
        try:
            check(fd, own, read_only=read_only)
        finally:
            os.close(fd)
        return
    mounts = _mounts()
    facts = _look(directory, mounts)
    reason = refusal(facts, _host(facts, own, mounts), read_only=read_only)
    if reason is not None:
        raise Denied(
            f"'{facts.place.path}' cannot be shown to a sandbox: {reason}",
            code="directory_forbidden",
            hint="make a directory that holds nothing but the project, for example"
            " ~/projects/NAME, and name that",
            details={"path": facts.place.path},
        )


def _look(fd: int, mounts: "Sequence[_Mount]") -> DirectoryFacts:
    status = os.fstat(fd)
    path = os.readlink(f"/proc/self/fd/{fd}")
    below = (one for one in mounts if one.point != path and _is_below(one.point, path))
    return DirectoryFacts(
        place=_place(path, mounts),
        owner=status.st_uid,
        identity=(status.st_dev, status.st_ino),
        mounts=tuple((one.device, one.root) for one in below),
        shielded=own_code(Path(path)),
    )


def _host(directory: DirectoryFacts, own: OwnPaths, mounts: "Sequence[_Mount]") -> HostFacts:
    return HostFacts(
        caller=os.geteuid(),
        homes=tuple(_homes(directory.owner, mounts)),
        private=tuple(_places(own.private, mounts)),
        code=tuple(_places((*own.code, *_code()), mounts)),
        temporary=os.path.realpath(tempfile.gettempdir()),
    )


def _homes(owner: int, mounts: "Sequence[_Mount]") -> Iterator[Home]:
    """Yield the home of each account with a shell, of the caller, and $HOME."""
    caller = os.geteuid()
    accounts = pwd.getpwall()
    for uid in (caller, owner):
        with suppress(KeyError):  # a list of all accounts may lack those of a directory service
            accounts.append(pwd.getpwuid(uid))
    homes = {
        (one.pw_dir, one.pw_name, one.pw_uid, _has_login(one))
        for one in accounts
        if one.pw_uid == caller or _has_login(one)
    }
    if (environment := os.environ.get("HOME", "")).startswith("/"):
        homes.add((environment, "this user", caller, True))
    for path, user, uid, login in sorted(homes):
        if path.startswith("/"):
            place = _place(os.path.realpath(path), mounts)
            yield Home(place, user, uid, login, frozenset(_identities(place.path)))


def _has_login(entry: pwd.struct_passwd) -> bool:
    return os.path.basename(entry.pw_shell) not in _NO_LOGIN


def _identities(path: str) -> Iterator[Identity]:
    for above in (path, *map(str, Path(path).parents)):
        with suppress(OSError):
            status = os.stat(above)
            if stat.S_ISDIR(status.st_mode):
                yield status.st_dev, status.st_ino


def _code() -> Iterator[Path]:
    """Yield this package and the Python that runs it."""
    yield Path(__file__).parents[1]
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    yield from (Path(paths[name]) for name in names)


def _places(paths: Iterable[Path], mounts: "Sequence[_Mount]") -> Iterator[Place]:
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        yield _place(path, mounts)


@dataclass(frozen=True, slots=True)
class _Mount:
    point: str
    device: str
    root: str


def _mounts() -> tuple[_Mount, ...]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            return parse_mounts(lines)
    except OSError:
        return ()


def parse_mounts(lines: Iterable[str]) -> tuple[_Mount, ...]:
    """Parse the lines of /proc/PID/mountinfo; see proc_pid_mountinfo(5)."""
    fields = (line.split(" ") for line in lines)
    return tuple(_Mount(_unescaped(one[4]), one[2], _unescaped(one[3])) for one in fields)


def _unescaped(field: str) -> str:
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escape, character)
    return field


def _place(path: str, mounts: Sequence[_Mount]) -> Place:
    """Return the place of a real path: its file system is the last one mounted nearest above."""
    above = [one for one in mounts if _is_below(path, one.point)]
    if not above:
        return Place(path)
    nearest = max(enumerate(above), key=lambda one: (len(one[1].point), one[0]))[1]
    rest = "/".join(_components(path[len(nearest.point) :]))
    source = os.path.normpath(f"{nearest.root}/{rest}")
    return Place(path, (nearest.device, f"/{source.lstrip('/')}"))
