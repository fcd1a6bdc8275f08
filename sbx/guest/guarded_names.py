"""The decisions of the path guard: whether the table of host executables permits a call.

Each check raises OSError for the caller: EROFS for a protected name, EPERM for a link that leads
out, EXDEV for a move that mv(1) then does as a copy.
"""

import errno
import json
import os
import stat

from sbx.guest import hard_links
from sbx.guest.guarded_paths import RULES, ResolvedPath, is_item
from sbx.guest.path_rules import HEAD, Parts, PathRules, RuleMatch, fold, leads_out
from sbx.linux import inode_flags


class GuardedNames:
    """The rules of one jail, from the file RULES, which the host replaces while the jail lives.

    `link_prefixes` are the directories where an absolute symlink in the workspace may lead.
    """

    def __init__(self, link_prefixes: tuple[str, ...]) -> None:
        self._rules = PathRules((), ())
        self._linked: set[tuple[int, int]] = set()  # protected files that have further names
        self._rules_seen: tuple[int, int] | None = None  # inode and mtime
        self._link_prefixes = link_prefixes

    def refresh(self) -> None:
        """Read the rules if the host has replaced them. Raise OSError EPERM without rules."""
        try:
            status = os.stat(RULES)
            if (seen := (status.st_ino, status.st_mtime_ns)) == self._rules_seen:
                return
            with open(RULES, "rb") as file:
                content = json.loads(file.read())
            rules = PathRules.from_json(content["rules"])
            linked = {(int(device), int(inode)) for device, inode in content["linked"]}
        except (OSError, ValueError):
            if self._rules_seen is None:
                raise PermissionError(errno.EPERM, "the guard has no rules") from None
            return  # the old rules stay in force
        self._rules, self._linked, self._rules_seen = rules, linked, seen

    def check(self, target: ResolvedPath, *, is_directory: bool = False) -> RuleMatch | None:
        """Return the match if `target` would be new in the quarantine, None if it is free. Raise
        OSError EROFS if it is protected."""
        parts = target.parts
        if hard_links.is_fresh(target.name):
            raise protected()  # the guard of another sandbox is about to rename it
        if fold(target.name) == fold(HEAD) and inode_flags.may_fold_case(target.parent):
            parts = (*parts[:-1], HEAD)
        match = self._rules.match(parts, target.exists, is_directory=is_directory)
        if match is not None and not match.is_new:
            raise protected()
        return match

    def check_existing(self, target: ResolvedPath, *, is_directory: bool = False) -> None:
        """Raise OSError EROFS if the table protects a name that is to be linked, moved or removed.
        A link to the quarantine is free."""
        if target.item() is None and self._rules.match(
            target.parts, target.exists, is_directory=is_directory
        ):
            raise protected()

    def check_inode(self, status: os.stat_result) -> None:
        """Raise OSError EROFS for a protected file, which may have a second name."""
        if (status.st_dev, status.st_ino) in self._linked:
            raise protected()

    def check_link(self, link: str, parts: Parts) -> None:
        """Check the text of a symlink that is about to be created at `parts`.

        A symlink may not lead out of the workspace on the host: a program that follows it there
        would be in a directory that this or another sandbox filled. Raise OSError EPERM.

        It may not give a directory of the workspace a name that the table has as a parent either:
        raise OSError EROFS. `bin/python` and `bin/pip` stay free, because an environment has them
        as links to programs.
        """
        if link.startswith("/"):  # with `..` after a name that is a link, it can lead anywhere
            is_below = any(link == top or link.startswith(f"{top}/") for top in self._link_prefixes)
            if is_below and ".." not in link.split("/"):
                return
        elif not leads_out(link, parts):
            if self._rules.is_parent(parts) and parts[-2:-1] != ("bin",):
                raise protected()
            return
        raise PermissionError(errno.EPERM, "a symlink would lead out of the directory")

    def check_above(self, target: ResolvedPath) -> None:
        """Raise OSError EROFS if a protected file may later exist below this name.

        A symlink or a directory with content would put another file in its place: `tools -> evil`
        for `tools/check`.
        """
        parts = target.parts
        if self._rules.is_above_alias(parts) or self._rules.is_import_name(parts):
            raise protected()

    def check_move(
        self, source: ResolvedPath, destination: ResolvedPath, path_fd: int, status: os.stat_result
    ) -> bool:
        """Check a move, and return whether rename(2) may do it by the names: then any other node
        that another context puts at the source meanwhile could go to the destination, too.

        Raise OSError EXDEV: mv(1) and others then copy the files, and each name is checked. Raise
        EROFS above an alias.
        """
        if self._rules.is_above_alias(source.parts):
            raise protected()
        self.check_above(destination)
        if stat.S_ISLNK(status.st_mode) and item_of(path_fd, status) is None:
            self.check_link(os.readlink("", dir_fd=path_fd), destination.parts)
        if stat.S_ISDIR(status.st_mode):
            self._check_directory(source, destination)
            return True
        try:
            self._check_directory(source, destination)
        except OSError:
            return False
        return True

    def _check_directory(self, source: ResolvedPath, destination: ResolvedPath) -> None:
        """Check the move of a directory by the names alone: the entries keep their meaning only if
        it stays in place."""
        if self.check(destination) is not None:
            raise OSError(errno.EXDEV, "the name is free for a directory only")
        if self._zone(source) != self._zone(destination):
            raise OSError(errno.EXDEV, "into or out of a tree of packages")
        if self._rules.is_build(source.parts) and not self._rules.is_build(destination.parts):
            raise OSError(errno.EXDEV, "out of a build directory")
        # Independent of its entries now: another process could add a name after a look.
        if self._rules.is_parent(destination.parts):
            raise OSError(errno.EXDEV, "the table has names below this one")
        if source.parts[:-1] == destination.parts[:-1]:
            return
        if ".git" in (*source.parts, *destination.parts):
            raise OSError(errno.EXDEV, "inside a repository")
        if len(source.parts) != len(destination.parts):
            # A relative symlink below would lead elsewhere. Another context could make one during
            # a search for them: so no directory ever changes its depth.
            raise OSError(errno.EXDEV, "to another depth")

    def _zone(self, target: ResolvedPath) -> tuple[bool, bool]:
        """Return which scopes of the table apply below a directory."""
        trees = [self._rules.is_package_tree(part) for part in target.parts]
        return any(trees), trees[-1]

    def check_linked(self, path_fd: int, status: os.stat_result) -> None:
        """Raise OSError for a symlink: at another depth it would lead elsewhere."""
        self.check_inode(status)
        if stat.S_ISLNK(status.st_mode) and item_of(path_fd, status) is None:
            raise PermissionError(errno.EPERM, "a hard link to a symlink")


def item_of(path_fd: int, status: os.stat_result) -> str | None:
    """Return the item that the symlink of an O_PATH descriptor leads to; None for anything else."""
    if not stat.S_ISLNK(status.st_mode):
        return None
    link = os.readlink("", dir_fd=path_fd)
    return link if is_item(link) else None


def protected() -> OSError:
    return OSError(errno.EROFS, "a program of the host obeys this name")
