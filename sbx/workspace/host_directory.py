"""A directory of the host as the workspace: `--workspace DIR`, projects, notebooks.

The user owns it and keeps it, so sbx creates nothing of its own in it. Programs of the host obey
some of its files (`host_executables`). sbx itself may run from it, since a project may hold its
environment, and the user may have a directory of it on PATH: `rules` names these paths.
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
from sbx.guest.path_rules import HEAD, Match
from sbx.linux.file_names import may_fold_case
from sbx.workspace import beneath
from sbx.workspace.host_executable_links import ExecutableLinks, find_links
from sbx.workspace.host_executable_trees import find_below, matches
from sbx.workspace.host_executables import path_rules
from sbx.workspace.paths import WORKSPACE
from sbx.workspace.refusals import translated, wrong_path
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Relative, Tree

_FRESH_S = 3.0
_LINKS_MAX = 40  # as Linux, see path_resolution(7)


class HostDirectory:
    """A directory that the user named, held open; `close` lets go of it."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self._executed = executed_paths(path)
        self.rules = path_rules(aliases=self._executed)
        self._links: ExecutableLinks | None = None  # None: `find_links` was not called yet
        self._merging = threading.Lock()
        self._found_at = 0.0
        self._add: tuple[str, ...] = ()
        self._remove: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, path: Path, *, jail_uid: int, read_only: bool = False, mapped: bool = False
    ) -> Self:
        """Hold `path` for a jail that runs as `jail_uid` on the host. `mapped`: an idmapped mount
        will show the owner of the directory as that uid.

        Raises NotFound, InvalidPath `not_a_directory`, Denied `workspace_owned_by_root` for one to
        be written to, and `directory_unreadable` for one that the jail could not look into.
        """
        with translated(str(path)):
            try:
                fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
            except NotADirectoryError as error:
                raise wrong_path(str(path), "not_a_directory", "is not a directory") from error
        # The path of what is held, not of what was named: symlinks may lead elsewhere by now.
        held = Path(os.readlink(f"/proc/self/fd/{fd}"))
        found = os.fstat(fd)
        refusal = None if mapped else _refusal(path, found, jail_uid, read_only)
        if refusal is not None:
            os.close(fd)
            raise refusal
        return cls(fd, held)

    def tree(self, *, view: str = WORKSPACE, owner: Owner | None = None) -> Tree:
        """The files in it, for the host's side; a tree of its own, to be closed by the caller."""
        return Tree(os.dup(self.fd), view=view, owner=owner)

    @property
    def owner(self) -> Owner:
        """The uid and gid of the directory, on disk."""
        found = os.fstat(self.fd)
        return found.st_uid, found.st_gid

    def identity(self, name: str = ".") -> tuple[int, int]:
        """(device, inode) of the directory, or of what it has by this name; a link's own."""
        fd = os.dup(self.fd) if name == "." else _held(self.fd, tuple(name.split("/")))
        try:
            found = os.fstat(fd)
            return found.st_dev, found.st_ino
        finally:
            os.close(fd)

    def set_patterns(self, *, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
        """Take the operator's patterns for the table."""
        self._add, self._remove = add, remove
        self.rules = path_rules(add=add, remove=remove, aliases=self._executed)

    def set_patterns_of(self, other: "HostDirectory") -> None:
        """Take the patterns of the directory that this one is a copy of, and protect what of ours
        lies there."""
        self._executed = other._executed
        self.set_patterns(add=other._add, remove=other._remove)

    def find_links(self) -> ExecutableLinks:
        """Look at what existing host executables lead to; `rules` covers it until `close`, also
        where a later walk does not find it again: code inside may have made the directory too large
        for one, or moved a part of it meanwhile. Blocks as `find_links` does."""
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
        """Return whether its path still leads to this directory, and not through a symlink."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        held = os.fstat(self.fd)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    # A call of the host's API may not write where code inside may not: a model may have asked for
    # it. Each of these raises Denied `runs_on_the_host`.

    def refuse_change(self, relative: Relative) -> None:
        """Refuse a write to the path, with the directories it needs. Blocks as `find_links` does
        where that was some seconds ago: the user works in the directory too."""
        match = self.created_by(relative)
        if match is not None:
            raise _runs_on_the_host(relative, match.program, match.name)

    def created_by(self, relative: Relative) -> Match | None:
        """Return the entry of the table that a write to the path would create; None if there is
        none. Refuse a write to an entry that exists. Blocks as `refuse_change` does."""
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
        """Refuse to delete or move a directory with a host executable in it; with `at`, to put it
        there. Raises NotFound, TooLarge `tree_too_large`."""
        is_import_name = bool(at) and self.rules.is_import_name(at or ())
        if is_import_name or self.rules.is_above_alias(of if at is None else at):
            raise _runs_on_the_host(of if at is None else at, "a program", "a file below it")
        match = find_below(tree, of, self.rules, self._exists, at=at)
        if match is not None:
            raise _runs_on_the_host(match[0], match[1].program, match[1].name)

    def created_by_all(self, relatives: Collection[Relative]) -> dict[Relative, Match]:
        """Return the entries that changes would create which are made together: each of them sees
        the others. Refuse them if one is to an entry that exists."""
        found: dict[Relative, Match] = {}
        for relative in relatives:
            if (match := self.created_by(relative)) is not None:
                found[relative] = match
        for path, match in matches(relatives, self.rules, self._exists):
            found.setdefault(path, match)
        return found

    def refuse_changes(
        self, relatives: Collection[Relative], approved: Collection[Relative] = ()
    ) -> None:
        """Refuse changes that are made together. `approved`: a person agreed to these new paths."""
        for path, match in self.created_by_all(relatives).items():
            if path not in approved:
                raise _runs_on_the_host(path, match.program, match.name)

    def refuse_link(self, relative: Relative) -> None:
        """Refuse a symlink in place of a directory above a protected file that is not there yet."""
        if self.rules.is_above_alias(relative) or self.rules.is_import_name(relative):
            raise _runs_on_the_host(relative, "a program", "a file below it")

    def is_protected(self, relative: Relative) -> bool:
        """Return whether code inside cannot write there. What a copy shows changed is a time."""
        return self.rules.match(relative, self._exists) is not None

    def keeps_meaning(self, of: Relative, at: Relative) -> bool:
        """Return whether the same entries of the table hold below both directories, and a relative
        symlink below leads to the same place: code inside may make one meanwhile."""
        if self.rules.is_parent(at):
            return False

        def zone(relative: Relative) -> tuple[bool, bool]:
            trees = [self.rules.is_package_tree(part) for part in relative]
            return any(trees), trees[-1]

        return len(of) == len(at) and zone(of) == zone(at)

    def _as_head(self, relative: Relative) -> Relative:
        """Return the path as git would see it, if `head` is HEAD for this file system."""
        is_head = relative[-1].casefold() == HEAD.casefold() and may_fold_case(self.fd)
        return (*relative[:-1], HEAD) if is_head else relative

    def _is_linked(self, relative: Relative) -> bool:
        assert self._links is not None
        try:
            fd = _held(self.fd, relative)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            return (found.st_dev, found.st_ino) in self._links.linked
        finally:
            os.close(fd)

    def _exists(self, parts: tuple[str, ...]) -> bool:
        try:
            os.close(_held(self.fd, parts))
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _runs_on_the_host(relative: Relative, program: str, name: str) -> Denied:
    path = "/".join(relative)
    return Denied(
        f"'{path}' is not changed: {program} on the host obeys '{name}'",
        code="runs_on_the_host",
        hint="change it outside of the sandbox, or set host_executables in the policy",
        details={"path": f"{WORKSPACE}/{path}", "name": name},
    )


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
    """Return the relative paths in it that decide which programs the host executes: our own code,
    directories on the caller's PATH, and each symlink that leads to one. `directory` has no symlink
    in it."""
    top = f"{str(directory).rstrip('/')}/"
    steps = (step for entry in directories_on_path() for step in _steps_to(entry))
    below = {step.removeprefix(top) for step in steps if step.startswith(top)}
    return tuple(sorted(below | {*own_code(directory)}))


def _held(root: int, relative: tuple[str, ...]) -> int:
    return beneath.opener()(root, relative, os.O_PATH | os.O_NOFOLLOW)
