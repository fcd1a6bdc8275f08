"""Check each host directory before a sandbox sees it, and collect the facts about this host.

    directory ─► look ─► facts ─► refusal (sbx.forbidden_directories) ─► a reason ─► check raises

Workspaces, projects, notebooks, host mode, uploads and mounts all call `check`. `host_facts` gives
the same facts to the broker of a confined service.

A client of a service, or a model, may name only the directories that a setting allows:
`MountSources` for mounts, `AllowedProjects` for projects. Both open a directory without
following a symlink, so that a user with write access there does not choose another directory.
"""

import errno
import os
import pwd
import stat
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from sbx.errors import BadRequest, Denied
from sbx.forbidden_directories import (
    SYSTEM_PATHS,
    ForbiddenPlace,
    HomeDirectory,
    HostDirectoryFacts,
    Identity,
    look,
    place_of,
    refusal,
)
from sbx.linux import mountinfo, openat2
from sbx.linux.descriptors import closing
from sbx.linux.mountinfo import MountInfo

_NO_LOGIN = ("nologin", "false", "sync", "shutdown", "halt")
_O_PATH = os.O_PATH | os.O_DIRECTORY
_RESOLVE = openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS
_PATH_MAX = 4095


class OwnPaths(Struct, frozen=True):
    """The paths of sbx; see HostFacts. The Python that runs this process counts as `code` too."""

    private: tuple[Path, ...] = ()
    code: tuple[Path, ...] = ()


# Raises Denied for a host directory, by its path or descriptor, that no sandbox may see; the second
# argument is whether it is read-only inside.
Check = Callable[[int | Path, bool], None]


def check(
    directory: int | str | Path, own: OwnPaths, *, read_only: bool = False, guarded: bool = True
) -> None:
    """Raise Denied `directory_forbidden` for a directory that no sandbox may see.

    `directory` is a path or an open descriptor. A path that cannot be opened passes, because the
    caller's own open reports the error. `guarded` means that the path guard protects the
    `executed_paths` from the code inside. This function reads the disk and the accounts: call it
    in a thread.
    """
    if not isinstance(directory, int):
        try:
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError):
            return
        with closing(fd):
            check(fd, own, read_only=read_only, guarded=guarded)
        return
    from sbx.workspace.host_directory import executed_paths  # 5 ms, needed for a host directory

    mounts = mountinfo.read()
    path = os.readlink(f"/proc/self/fd/{directory}")
    facts = look(directory, mounts, executed_paths(Path(path)) if guarded else ())
    host = host_facts(own, [facts.owner], mounts)
    reason = refusal(facts, host, read_only=read_only)
    if reason is not None:
        raise Denied(
            f"'{facts.place.path}' cannot be shown to a sandbox: {reason}",
            code="directory_forbidden",
            hint="create a directory for the project alone, for example ~/projects/NAME, and use"
            " that directory",
            details={"path": facts.place.path},
        )


def host_facts(
    own: OwnPaths, owners: Iterable[int], mounts: Sequence[MountInfo]
) -> HostDirectoryFacts:
    """Return the facts about this host.

    `owners` are the uids of directories. Their homes count even if the list of accounts lacks them.
    """
    real = {path: os.path.realpath(path) for path in SYSTEM_PATHS}
    from sbx.workspace.host_directory import directories_on_path

    sources = {path: mountinfo.source_of(real[path], mounts) for path in SYSTEM_PATHS}
    return HostDirectoryFacts(
        caller=os.geteuid(),
        homes=tuple(_homes(owners, mounts)),
        private=tuple(_places(own.private, mounts)),
        code=tuple(_places((*own.code, *_code()), mounts)),
        programs=tuple(_places(directories_on_path(), mounts)),
        temporary=os.path.realpath(tempfile.gettempdir()),
        sources={path: source for path, source in sources.items() if source is not None},
    )


def _homes(owners: Iterable[int], mounts: Sequence[MountInfo]) -> Iterator[HomeDirectory]:
    """Yield the home of each account with a shell, of the caller, and $HOME."""
    caller = os.geteuid()
    accounts = pwd.getpwall()
    for uid in {caller, *owners}:
        with suppress(KeyError):  # getpwall may lack the accounts of a directory service
            accounts.append(pwd.getpwuid(uid))
    homes = {
        (account.pw_dir, account.pw_name, account.pw_uid, _has_login(account))
        for account in accounts
        if account.pw_uid == caller or _has_login(account)
    }
    if (environment := os.environ.get("HOME", "")).startswith("/"):
        homes.add((environment, "this user", caller, True))
    for path, user, uid, login in sorted(homes):
        if path.startswith("/"):
            place = place_of(os.path.realpath(path), mounts)
            yield HomeDirectory(place, user, uid, login, frozenset(_identities(place.path)))


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


def _places(paths: Iterable[Path], mounts: Sequence[MountInfo]) -> Iterator[ForbiddenPlace]:
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        yield place_of(path, mounts)


class MountSources(Struct, frozen=True):
    """The directories that a service may mount into live sandboxes.

    `within` lists directories: each of them and everything below is allowed. `writable` is whether
    a mount may be writable. If the service dropped root's rights, its broker checks each mount
    again (`sbx.isolation.broker.allowlist`).
    """

    within: Sequence[Path]
    writable: bool

    def check(self, source: Path, *, read_only: bool) -> None:
        """Check the path alone. Raise Denied `not_granted`."""
        self._top_of(source)
        if not read_only and not self.writable:
            raise Denied(
                "a service that was started as root mounts directories read-only",
                code="not_granted",
                hint="leave --write (read_only = false) out, or serve as the directory's owner",
            )

    def open(self, source: Path) -> int:
        """Return an O_PATH descriptor, which the caller closes. Raise Denied `not_granted`, and
        OSError, also for a symlink below the allowed directory."""
        top = self._top_of(source)
        return _open_below(os.open(top, _O_PATH | os.O_CLOEXEC), source.relative_to(top))

    def _top_of(self, source: Path) -> Path:
        for top in self.within:
            if source.is_relative_to(top):
                return top
        allowed = ", ".join(map(str, self.within)) or "none"
        raise Denied(
            f"{source} lies in none of the directories that this service mounts: {allowed}",
            code="not_granted",
            hint="name it in the setting mount_dirs (SBX_MOUNT_DIRS, sbx serve --mount-dirs)"
            " and start the service again",
        )


class AllowedProjects(Struct, frozen=True):
    """The directories that may be projects.

    `within` lists directories: each of them and everything below is allowed. `own` are the paths of
    sbx. `owners` are uids whose directories may be mapped: a directory of root is refused unless
    root is one of them, and with `mapped_only` a directory of each other uid is refused, too.

    The methods read the disk. They raise BadRequest `invalid_directory`, and Denied `not_granted`,
    `directory_forbidden` and `workspace_owned_by_root`.
    """

    within: Sequence[Path]
    own: OwnPaths
    owners: Collection[int] = ()
    mapped_only: bool = False

    def resolve(self, name: str) -> Path:
        """Return the one path of this directory that contains no symlink."""
        if (
            not name.startswith("/")
            or ".." in name.split("/")
            or "\0" in name
            or len(name) > _PATH_MAX
        ):
            raise _invalid(name, "it is not an absolute path without ..")
        try:
            real = Path(os.path.realpath(name))
            name.encode()
        except (OSError, UnicodeEncodeError):
            raise _invalid(name, "no file has such a name") from None
        self.check(real)
        return real

    def names_in(self, name: str, limit: int) -> list[str]:
        """Return the names of at most `limit` visible directories in one that may be a project; []
        if it cannot be read."""
        try:
            with os.scandir(self.resolve(name)) as entries:
                visible = (
                    each.name
                    for each in entries
                    if each.is_dir(follow_symlinks=False) and not each.name.startswith(".")
                )
                return sorted(islice(visible, limit))
        except OSError:
            return []

    def check(self, directory: Path) -> None:
        """Check that the directory, named by its path without symlinks, may be a project now."""
        top = self._top_of(directory)
        try:
            outer = os.open(top, _O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            fd = _open_below(outer, directory.relative_to(top))
        except OSError as error:
            replaced = error.errno in (errno.ELOOP, errno.EXDEV)
            why = os.strerror(error.errno or errno.EIO)
            if replaced:
                why = "a symlink has taken its place, or one above it"
            raise _invalid(str(directory), why) from None
        try:
            check(fd, self.own)
            self._check_status(directory, os.fstat(fd))
        finally:
            os.close(fd)

    def _top_of(self, directory: Path) -> Path:
        for top in map(Path, map(os.path.realpath, self.within)):
            if directory.is_relative_to(top):
                return top
        raise Denied(
            f"{directory} lies in none of the directories that may hold projects here",
            code="not_granted",
            hint="the operator names them in the setting project_dirs (SBX_PROJECT_DIRS)",
        )

    def _check_status(self, directory: Path, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            raise _invalid(str(directory), "it is not a directory")
        if status.st_uid == 0 and 0 not in self.owners:
            raise Denied(
                f"'{directory}' belongs to root, and the operator allows no project of root",
                code="workspace_owned_by_root",
                hint="the operator names root in the setting project_owners (SBX_PROJECT_OWNERS);"
                " or give the directory to another user (chown)",
            )
        if self.mapped_only and status.st_uid not in self.owners:
            raise Denied(
                f"'{directory}' belongs to uid {status.st_uid}, whom the operator does not name",
                code="not_granted",
                hint="the operator names the owner in the setting project_owners"
                " (SBX_PROJECT_OWNERS)",
            )


def _open_below(top: int, below: Path) -> int:
    """Return an O_PATH descriptor of a directory below `top`, an fd that this function closes."""
    try:
        return openat2.openat2(top, os.fsencode(below), _O_PATH, resolve=_RESOLVE)
    finally:
        os.close(top)


def _invalid(name: str, why: str) -> BadRequest:
    return BadRequest(
        f"{str(name)[:200]!r} cannot be a working directory: {why}",
        code="invalid_directory",
        hint="name a directory of the host by its absolute path",
    )
