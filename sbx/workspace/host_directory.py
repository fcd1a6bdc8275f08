"""A directory of the host as the workspace: `--workspace DIR`, projects, notebooks.

The user owns the directory, so sbx does not create files for itself in it. Programs of the host
obey some of its files (`host_executables`). sbx itself may run from it if the project contains the
environment of sbx, and the user's PATH may contain one of its directories. `rules` protects these
paths.
"""

import functools
import os
import stat
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Self

from sbx.errors import Denied
from sbx.guest.path_rules import HEAD, HIDDEN, OPTION, RuleMatch, fold, reason
from sbx.linux.descriptors import OwnedDescriptor, closing
from sbx.linux.inode_flags import may_fold_case
from sbx.workspace import safe_open
from sbx.workspace.errors import translated, wrong_path
from sbx.workspace.host_executable_links import ExecutableLinks, find_links
from sbx.workspace.host_executable_trees import find_below, matches
from sbx.workspace.host_executables import path_rules
from sbx.workspace.outside import git_outside
from sbx.workspace.paths import WORKSPACE
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Relative, Tree

_FRESH_S = 3.0
_LINKS_MAX = 40  # the limit of Linux, see path_resolution(7)


class HostDirectory(OwnedDescriptor):
    """A directory that the user named. Its fd stays open until `close`."""

    def __init__(self, fd: int, path: Path) -> None:
        super().__init__(fd)
        self.path = path
        self.git_outside = bool(git_outside(path))
        self._executed = executed_paths(path)
        self.rules = path_rules(aliases=self._executed)
        self._links: ExecutableLinks | None = None  # None before the first call of `find_links`
        self._merging = threading.Lock()
        self._found_at = 0.0
        self._add: tuple[str, ...] = ()
        self._remove: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, path: Path, *, jail_uid: int, read_only: bool = False, mapped: bool = False
    ) -> Self:
        """Open `path` for a jail that runs as `jail_uid` on the host.

        `mapped`: an idmapped mount will show the owner of the directory as that uid. Raises
        NotFound, InvalidPath `not_a_directory`, Denied `workspace_owned_by_root` for a writable
        directory of root, and Denied `directory_unreadable` if the jail could not read a read-only
        directory.
        """
        with translated(str(path)):
            try:
                fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
            except NotADirectoryError as error:
                raise wrong_path(str(path), "not_a_directory", "is not a directory") from error
        # The path of the open directory: symlinks in the caller's path may lead elsewhere by now.
        real_path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        status = os.fstat(fd)
        refusal = None if mapped else _refusal(path, status, jail_uid, read_only)
        if refusal is not None:
            os.close(fd)
            raise refusal
        return cls(fd, real_path)

    def tree(self, *, view: str = WORKSPACE, owner: Owner | None = None) -> Tree:
        """Return a new tree of the files, for access from the host. The caller closes it."""
        return Tree(os.dup(self.fd), view=view, owner=owner)

    @property
    def owner(self) -> Owner:
        status = os.fstat(self.fd)
        return status.st_uid, status.st_gid

    def identity(self, name: str = ".") -> tuple[int, int]:
        """Return (device, inode) of the directory, or of a name in it; for a symlink, its own."""
        with closing(
            os.dup(self.fd) if name == "." else _open_path(self.fd, tuple(name.split("/")))
        ) as fd:
            status = os.fstat(fd)
            return status.st_dev, status.st_ino

    def set_patterns(self, *, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
        self._add, self._remove = add, remove
        self.rules = path_rules(add=add, remove=remove, aliases=self._executed)

    def set_patterns_of(self, other: "HostDirectory") -> None:
        """Take the patterns and the `executed_paths` of the directory of which this one is a
        copy."""
        self._executed = other._executed
        self.set_patterns(add=other._add, remove=other._remove)

    def find_links(self) -> ExecutableLinks:
        """Find the files that existing host executables lead to, and add them to `rules`.

        They stay in `rules` until `close`, even if a later walk does not find them again: code
        inside may have moved a part of the directory, or made it too large for a walk. Blocks for
        the duration of `host_executable_links.find_links`.
        """
        rules = path_rules(add=self._add, remove=self._remove, aliases=self._executed)
        links = find_links(self.fd, rules)
        with self._merging:  # calls come from several threads
            if self._links is not None:
                links.add(self._links)
            aliases = (*self._executed, *links.aliases)
            add = (*self._add, *((".gitattributes",) if links.drivers else ()))
            self.rules = path_rules(
                add=add,
                remove=self._remove,
                aliases=aliases,
                import_roots=tuple(links.import_roots),
            )
            self._links, self._found_at = links, time.monotonic()
        return links

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this directory and is not a symlink."""
        try:
            at_path = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        opened = os.fstat(self.fd)
        return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)

    # Calls of the API on the host may not write where code inside may not, because a model may have
    # requested them. Each of these methods raises Denied `runs_on_the_host`.

    def refuse_change(self, relative: Relative) -> None:
        """Refuse a write to the path, or the creation of its missing directories.

        Calls `find_links`, which blocks, if the last call is more than `_FRESH_S` seconds ago: the
        user works in the directory, too.
        """
        match = self.created_by(relative)
        if match is not None:
            raise _runs_on_the_host(relative, match.program, match.name)

    def created_by(self, relative: Relative) -> RuleMatch | None:
        """Return the entry of the table that a write to the path would create, or None.

        Refuse a write to an existing entry. Blocks as `refuse_change` does.
        """
        if self._links is None or time.monotonic() > self._found_at + _FRESH_S:
            self.find_links()
        for depth in range(1, len(relative) + 1):
            part = relative[:depth]
            if part == relative or not self._exists(part):
                named = self._as_head(part)
                match = self.rules.match(named, self._exists, is_directory=part != relative)
                if match is not None and not match.is_new:
                    raise _runs_on_the_host(relative, match.program, match.name)
                if match is not None:
                    return match
        if self._links and self._links.linked and relative and self._is_linked(relative):
            raise _runs_on_the_host(relative, "a program", "another name of the same file")
        return None

    def refuse_below(self, tree: Tree, of: Relative, *, at: Relative | None = None) -> None:
        """Refuse to delete or move a directory that contains a host executable.

        With `at`, refuse to place it at that path. Raises NotFound, TooLarge `tree_too_large`.
        """
        is_import_name = bool(at) and self.rules.is_import_name(at or ())
        if is_import_name or self.rules.is_above_alias(of if at is None else at):
            raise _runs_on_the_host(of if at is None else at, "a program", "a file below it")
        match = find_below(tree, of, self.rules, self._exists, at=at)
        if match is not None:
            raise _runs_on_the_host(match[0], match[1].program, match[1].name)

    def created_by_all(self, relatives: Collection[Relative]) -> dict[Relative, RuleMatch]:
        """Return the entries that changes made together would create: each of them sees the
        others. Refuse all of them if one of them writes to an existing entry."""
        created: dict[Relative, RuleMatch] = {}
        for relative in relatives:
            if (match := self.created_by(relative)) is not None:
                created[relative] = match
        for path, match in matches(relatives, self.rules, self._exists):
            created.setdefault(path, match)
        return created

    def refuse_changes(
        self, relatives: Collection[Relative], approved: Collection[Relative] = ()
    ) -> None:
        """Refuse changes that are made together. A user has approved the new paths `approved`."""
        for path, match in self.created_by_all(relatives).items():
            if path not in approved:
                raise _runs_on_the_host(path, match.program, match.name)

    def refuse_link(self, relative: Relative) -> None:
        """Refuse a symlink in place of a directory above a protected path without a file yet."""
        if self.rules.is_above_alias(relative) or self.rules.is_import_name(relative):
            raise _runs_on_the_host(relative, "a program", "a file below it")

    def is_protected(self, relative: Relative) -> bool:
        """Return whether code inside cannot write there. In a copy, only times can differ there."""
        return self.rules.match(relative, self._exists) is not None

    def keeps_meaning(self, of: Relative, at: Relative) -> bool:
        """Return whether the table protects the same names below both directories.

        A relative symlink below them must also lead to the same place: code inside may create one
        in the meantime.
        """
        if self.rules.is_parent(at) or (self.rules.is_build(of) and not self.rules.is_build(at)):
            return False

        def zone(relative: Relative) -> tuple[bool, bool]:
            trees = [self.rules.is_package_tree(part) for part in relative]
            return any(trees), trees[-1]

        return len(of) == len(at) and zone(of) == zone(at)

    def _as_head(self, relative: Relative) -> Relative:
        """Return the path as git sees it: the file system may treat `head` as HEAD."""
        is_head = fold(relative[-1]) == fold(HEAD) and may_fold_case(self.fd)
        return (*relative[:-1], HEAD) if is_head else relative

    def _is_linked(self, relative: Relative) -> bool:
        assert self._links is not None
        try:
            fd = _open_path(self.fd, relative)
        except OSError:
            return False
        with closing(fd):
            status = os.fstat(fd)
            return (status.st_dev, status.st_ino) in self._links.linked

    def _exists(self, parts: tuple[str, ...]) -> bool:
        try:
            os.close(_open_path(self.fd, parts))
        except OSError:
            return False
        return True


def _runs_on_the_host(relative: Relative, program: str, name: str) -> Denied:
    path = "/".join(relative)
    is_new = name in (HIDDEN, OPTION)
    why = reason(name, program) if is_new else f"{program} on the host obeys '{name}'"
    return Denied(
        f"'{path}' is not changed: {why}",
        code="runs_on_the_host",
        hint="change it outside of the sandbox, or set host_executables in the policy",
        details={"path": f"{WORKSPACE}/{path}", "name": name},
    )


def _refusal(path: Path, status: os.stat_result, jail_uid: int, read_only: bool) -> Denied | None:
    if not read_only and status.st_uid == 0 != jail_uid:
        return Denied(
            f"'{path}' belongs to root, and nothing inside a sandbox may be root outside",
            code="workspace_owned_by_root",
            hint="give the directory to another user (chown), or copy it to your own directory",
            details={"path": str(path)},
        )
    readable = stat.S_IROTH | stat.S_IXOTH
    foreign = jail_uid not in (os.geteuid(), status.st_uid)
    if read_only and foreign and status.st_mode & readable != readable:
        return Denied(
            f"'{path}' is readable only for its owner, and a sandbox has another uid",
            code="directory_unreadable",
            hint=f"let others read it: chmod o+rx '{path}'",
            details={"path": str(path)},
        )
    return None


@functools.cache
def _homes_of_ours() -> frozenset[str]:
    """Return the environment that runs this process, and the directory of this package."""
    return frozenset(os.path.realpath(home) for home in (sys.prefix, Path(__file__).parents[1]))


def own_code(directory: Path) -> tuple[str, ...]:
    """Return the relative paths of the code of sbx in the directory.

    `directory` has no symlink in its path. Code inside that could write there would run on the host
    at the next start of a process.
    """
    top = f"{str(directory).rstrip('/')}/"
    return tuple(sorted(home[len(top) :] for home in _homes_of_ours() if home.startswith(top)))


def directories_on_path() -> tuple[Path, ...]:
    """Return the directories on the caller's PATH. Relative and empty entries are ignored."""
    entries = os.environ.get("PATH", "").split(os.pathsep)
    return tuple(Path(entry) for entry in dict.fromkeys(entries) if entry.startswith("/"))


def _steps_to(path: Path) -> Iterator[str]:
    """Yield each symlink on the way to a path, and the real path."""
    at, pending = "/", [*reversed(path.parts[1:])]
    links = 0
    while pending:
        part = pending.pop()
        at = os.path.normpath(os.path.join(at, part))
        try:
            target = os.readlink(at)
        except OSError:
            continue
        yield at
        links += 1
        if links > _LINKS_MAX:
            return
        at = "/" if target.startswith("/") else os.path.dirname(at)
        pending += [part for part in reversed(target.split("/")) if part]
    yield at


def executed_paths(directory: Path) -> tuple[str, ...]:
    """Return the relative paths that decide which programs the host executes.

    These are the code of sbx, the directories on the caller's PATH, and each symlink that leads to
    one of them. `directory` has no symlink in its path.
    """
    top = f"{str(directory).rstrip('/')}/"
    steps = (step for entry in directories_on_path() for step in _steps_to(entry))
    below = {step.removeprefix(top) for step in steps if step.startswith(top)}
    return tuple(sorted(below | {*own_code(directory)}))


def _open_path(root: int, relative: tuple[str, ...]) -> int:
    return safe_open.opener()(root, relative, os.O_PATH | os.O_NOFOLLOW)
