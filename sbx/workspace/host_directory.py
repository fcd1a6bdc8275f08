"""A directory of the host as the workspace: `--workspace DIR`, projects, notebooks.

The user owns it and keeps it, so sbx creates nothing of its own in it. What lies there may be run
later *on the host* by git, direnv or an editor, or by sbx itself, whose environment a project may
hold: those files are what `protected_paths` names.
"""

import errno
import functools
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sbx.errors import Denied
from sbx.workspace import beneath
from sbx.workspace.paths import WORKSPACE
from sbx.workspace.refusals import translated, wrong_path
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Relative, Tree

# Each of these makes a program of the host run what it says, without a further question asked.
RUNS_ON_THE_HOST = (
    ".git/hooks",
    ".git/config",  # core.fsmonitor, core.pager, aliases: commands
    ".gitconfig",
    ".envrc",
    ".vscode",
    ".idea",
    ".devcontainer",
    ".husky",
    ".mcp.json",
    ".bashrc",
    ".bash_profile",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".ssh",
)
_FIRST_NAMES = frozenset(path.partition("/")[0] for path in RUNS_ON_THE_HOST)


@dataclass(frozen=True)
class Protection:
    """What to do about files that would run later on the host. Paths relative to the directory.

    `pinned` directories are bound onto themselves first: a mount point cannot be renamed away, but
    its parent can, and with `.git` renamed a fresh `.git/hooks` could be made. `read_only` comes
    next. `symlinks` cannot be protected, because a bind would follow them out of the directory:
    whoever starts the sandbox should be told.
    """

    pinned: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    symlinks: tuple[str, ...] = ()


class HostDirectory:
    """A directory that the user named, held open; `close` lets go of it."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    @classmethod
    def open(cls, path: Path, *, jail_uid: int, read_only: bool = False) -> Self:
        """Hold `path` for a jail that runs as `jail_uid` on the host.

        Raises NotFound, InvalidPath `not_a_directory`, Denied `workspace_owned_by_root` for one to
        be written to, and Denied `directory_unreadable` for one that the jail could not look into.
        """
        with translated(str(path)):
            try:
                fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
            except NotADirectoryError as error:
                raise wrong_path(str(path), "not_a_directory", "is not a directory") from error
        if (refusal := _refusal(path, os.fstat(fd), jail_uid, read_only)) is not None:
            os.close(fd)
            raise refusal
        # The path of what is held, not of what was named: symlinks may lead elsewhere by now.
        return cls(fd, Path(os.readlink(f"/proc/self/fd/{fd}")))

    def tree(self, *, view: str = WORKSPACE, owner: Owner | None = None) -> Tree:
        """The files in it, for the host's side; a tree of its own, to be closed by the caller."""
        return Tree(os.dup(self.fd), view=view, owner=owner)

    def identity(self, name: str = ".") -> tuple[int, int]:
        """(device, inode) of the directory, or of what it has by this name; a link's own."""
        fd = os.dup(self.fd) if name == "." else _held(self.fd, tuple(name.split("/")))
        try:
            found = os.fstat(fd)
            return found.st_dev, found.st_ino
        finally:
            os.close(fd)

    def is_in_place(self) -> bool:
        """Return whether its path still leads to this directory, and not through a symlink."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        held = os.fstat(self.fd)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def refuse_change(self, relative: Relative) -> None:
        """What the code inside finds read-only or pinned no call of the host's side changes either:
        a model may have asked for it. Raises Denied `runs_on_the_host`."""
        firsts = {name.partition("/")[0] for name in own_code(self.path)} | _FIRST_NAMES
        if not relative or relative[0] not in firsts:
            return
        with translated("/".join(relative)):
            found = protected_paths(self)
        for name in (*found.pinned, *found.read_only, *found.symlinks):
            parts = tuple(name.split("/"))
            below = relative[: len(parts)] == parts and name not in found.pinned
            if below or parts[: len(relative)] == relative:
                raise Denied(
                    f"'{'/'.join(relative)}' is, or holds, what a program of the host would run",
                    code="runs_on_the_host",
                    hint=f"{name} is read-only in a sandbox: change it outside, if that is meant",
                    details={"path": f"{WORKSPACE}/{'/'.join(relative)}"},
                )

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refusal(path: Path, found: os.stat_result, jail_uid: int, read_only: bool) -> Denied | None:
    if not read_only and found.st_uid == 0 != jail_uid:
        return Denied(
            f"'{path}' belongs to root, and nothing inside a sandbox may be root outside",
            code="workspace_owned_by_root",
            hint="give the directory to another user (chown), or copy it to one of your own",
            details={"path": str(path)},
        )
    looked_into = stat.S_IROTH | stat.S_IXOTH
    foreign = jail_uid not in (os.geteuid(), found.st_uid)
    if read_only and foreign and found.st_mode & looked_into != looked_into:
        return Denied(
            f"'{path}' can be read by its owner only, and a sandbox has a uid of its own",
            code="directory_unreadable",
            hint=f"let others read it: chmod o+rx '{path}'",
            details={"path": str(path)},
        )
    return None


@functools.cache
def _homes_of_ours() -> frozenset[str]:
    """The environment that runs this very process, and this package."""
    return frozenset(os.path.realpath(home) for home in (sys.prefix, Path(__file__).parents[1]))


def own_code(directory: Path) -> tuple[str, ...]:
    """What of ours lies in it, by a path without symlinks, as relative paths: code inside that
    could write there would run on the host, with the next start of a process."""
    top = f"{str(directory).rstrip('/')}/"
    return tuple(sorted(home[len(top) :] for home in _homes_of_ours() if home.startswith(top)))


def protected_paths(directory: HostDirectory) -> Protection:
    """Which of RUNS_ON_THE_HOST and of `own_code` exist in `directory`, looked up without following
    a symlink.

    Where `.git` itself is a file (a worktree or submodule), it is that which becomes read-only.
    """
    found: dict[str, list[str]] = {"pinned": [], "read_only": [], "symlinks": []}
    for path in (*RUNS_ON_THE_HOST, *own_code(directory.path)):
        parts = tuple(path.split("/"))
        for depth in range(1, len(parts) + 1):
            mode = _mode(directory.fd, parts[:depth])
            name = "/".join(parts[:depth])
            if mode is None:
                break
            if stat.S_ISLNK(mode):
                _add(found["symlinks"], name)
                break
            if depth == len(parts) or not stat.S_ISDIR(mode):
                _add(found["read_only"], name)
                break
            _add(found["pinned"], name)
    return Protection(*(tuple(found[key]) for key in ("pinned", "read_only", "symlinks")))


def _add(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _held(root: int, relative: tuple[str, ...]) -> int:
    return beneath.opener()(root, relative, os.O_PATH | os.O_NOFOLLOW)


def _mode(root: int, relative: tuple[str, ...]) -> int | None:
    try:
        fd = _held(root, relative)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    try:
        return os.fstat(fd).st_mode
    finally:
        os.close(fd)
