"""Check each host directory before a sandbox sees it, and collect the facts about this host.

    directory ─► look ─► facts ─► refusal (sbx.forbidden_directories) ─► a reason ─► check raises

Workspaces, projects, notebooks, host mode, uploads and mounts all call `check`. `host_facts`
gives the same facts to the broker of a confined service.
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
from sbx.linux import mountinfo
from sbx.linux.mountinfo import MountInfo
from sbx.workspace.host_directory import directories_on_path, executed_paths

_NO_LOGIN = ("nologin", "false", "sync", "shutdown", "halt")


@dataclass(frozen=True, slots=True)
class OwnPaths:
    """The paths of sbx; see HostFacts. The Python that runs this process counts as `code` too."""

    private: tuple[Path, ...] = ()
    code: tuple[Path, ...] = ()


class Check(Protocol):
    """Raise Denied for a host directory that no sandbox may see, by its path or descriptor."""

    def __call__(
        self, directory: int | Path, /, *, read_only: bool, guarded: bool = True
    ) -> None: ...


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
        try:
            check(fd, own, read_only=read_only, guarded=guarded)
        finally:
            os.close(fd)
        return
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
