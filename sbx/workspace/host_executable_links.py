"""Find what an existing host executable of a directory leads to, by a link or by its text.

The path guard protects by name. These things need a look at the directory before a kernel starts:

    symlink      `.envrc -> config/envrc`: the target is as good as the name
    hard link    a protected file with a second name: protected by its inode
    git config   `core.hooksPath = tools/hooks`, `core.fsmonitor`, drivers, `include.path`: each
                 file or directory of the tree that a value names, also one that is not there yet;
                 of the user's own settings each relative path. `.gitattributes`, where a driver is
                 defined
    .envrc       the files that it reads, the directories that it puts on PATH
    hooks        of git, husky, pre-commit and lefthook: the files that they execute. The rule for
                 words of commands is in `executed_words`: `npm test`, `make` and the arguments of
                 a linter do not count. Of the modules that a Python program imports from its own
                 directory, or `python -m` from the working directory, those of the standard
                 library count
    environment  a directory with `pyvenv.cfg`: its path stays protected when it is moved

Repositories and `.envrc` above the directory count too, since git and direnv look for them upwards.

The walk follows no symlink and has limits, which code inside can exhaust. So the names of the table
in the directory itself are looked up before the walk, and those of a large directory before the
rest of its entries. It is repeated while code runs (`runtime.link_watch`).
"""

import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from sbx.guest.path_rules import Parts, PathRules
from sbx.workspace.host_executable_texts import (
    HOOK_CONFIGURATIONS,
    HOOK_DIRECTORIES,
    HostExecutableTexts,
)

ENTRIES_MAX = 100_000
DEADLINE_S = 3.0
_TURN = 1_000  # entries of one directory, until the others have their turn
_ABOVE = (".git", ".envrc", *HOOK_DIRECTORIES, *HOOK_CONFIGURATIONS)


@dataclass(slots=True)
class ExecutableLinks:
    """`aliases`: further paths to protect. `import_roots`: directories from which a host executable
    in Python imports its modules, "" for the directory itself. `linked`: (device, inode) of
    protected files with more than one name. `protected`: the existing names of the table.
    `drivers`: whether a configuration of git defines a driver. `complete`: whether the walk saw the
    whole directory."""

    aliases: set[str] = field(default_factory=set)
    import_roots: set[str] = field(default_factory=set)
    linked: set[tuple[int, int]] = field(default_factory=set)
    protected: list[str] = field(default_factory=list)
    drivers: bool = False
    complete: bool = True

    def add(self, earlier: "ExecutableLinks") -> None:
        """Keep what an earlier walk found. `protected` and `complete` are of this walk only."""
        self.aliases |= earlier.aliases
        self.import_roots |= earlier.import_roots
        self.linked |= earlier.linked
        self.drivers = self.drivers or earlier.drivers


def find_links(root: int, rules: PathRules) -> ExecutableLinks:
    """Walk the directory that the fd `root` holds. Blocks for `DEADLINE_S` seconds at most."""
    walk = _Walk(root, rules)
    walk.look_above()
    walk.look_at_names(())
    walk.look_at_entries(time.monotonic() + DEADLINE_S)
    return walk.links


class _Walk:
    def __init__(self, root: int, rules: PathRules) -> None:
        self._root = root
        self._rules = rules
        self._top = os.path.realpath(f"/proc/self/fd/{root}")
        self._texts = HostExecutableTexts(self._top, os.fstat(root).st_uid)
        self._aliases = self._texts.aliases
        self._protected: dict[Parts, None] = {}
        self._linked: set[tuple[int, int]] = set()
        self._complete = True

    @property
    def links(self) -> ExecutableLinks:
        return ExecutableLinks(
            self._aliases.paths,
            self._aliases.import_roots,
            self._linked,
            ["/".join(parts) for parts in self._protected],
            self._texts.drivers,
            self._complete and not self._texts.is_cut_off,
        )

    def look_above(self) -> None:
        """Look at what holds for the directory and is configured elsewhere."""
        self._texts.read_user_settings()
        directory = self._top
        while directory != (parent := os.path.dirname(directory)):
            directory = parent
            for name in _ABOVE:
                path = os.path.join(directory, name)
                if os.path.lexists(path):
                    self._aliases.protect(path)
                    self._texts.read(path)

    def look_at_names(self, directory: Parts) -> None:
        """Look for the exact names of the table, without a walk over the entries."""
        for name in self._rules.exact_names:
            parts = (*directory, name)
            with suppress(OSError):
                mode = os.lstat("/".join(parts), dir_fd=self._root).st_mode
                if self._rules.match_name(parts) is not None:
                    self._take(parts, mode)

    def look_at_entries(self, until: float) -> None:
        """Breadth first, and of a large directory `_TURN` entries at a time."""
        seen, rules_for = 0, self._rules.rules_for
        pending: deque[tuple[Parts, Iterator[os.DirEntry[str]] | None]] = deque([((), None)])
        while pending:
            directory, rest = pending.popleft()
            entries = rest or _entries(self._root, directory)
            parent = directory[-1].casefold() if directory else ""
            last = seen + _TURN
            for entry in entries:
                seen += 1
                if seen > ENTRIES_MAX or time.monotonic() > until:
                    self._complete = False
                    return
                name = entry.name
                if name != "pyvenv.cfg" and not rules_for(name.casefold(), parent):
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(((*directory, name), None))
                elif self._look_at(directory, entry):
                    pending.append(((*directory, name), None))
                if seen == last:
                    if rest is None and directory:
                        self.look_at_names(directory)
                    pending.append((directory, entries))
                    break

    def _look_at(self, directory: Parts, entry: os.DirEntry[str]) -> bool:
        """Look at a name of the table; return whether to walk into the entry."""
        parts = (*directory, entry.name)
        if entry.name == "pyvenv.cfg" and directory:
            self._aliases.paths.add("/".join(directory))
        if self._rules.match_name(parts) is None:
            return entry.is_dir(follow_symlinks=False)
        with suppress(OSError):
            self._take(parts, entry.stat(follow_symlinks=False).st_mode)
        return False

    def _take(self, parts: Parts, mode: int) -> None:
        """Follow a protected name, look into it, read it."""
        if parts in self._protected:
            return
        self._protected[parts] = None
        path = os.path.join(self._top, *parts)
        if stat.S_ISLNK(mode):
            self._follow(parts)
        elif stat.S_ISDIR(mode):
            self._look_into(parts)
        else:
            self._note_inode(os.lstat(path))
        self._texts.read(path)

    def _follow(self, parts: Parts) -> None:
        """Protect the target of a protected symlink, where it lies in the directory."""
        self._aliases.protect(os.path.join(self._top, *parts))
        self._aliases.paths.discard("/".join(parts))  # by its name already

    def _look_into(self, parts: Parts) -> None:
        """Follow the links in a protected directory: `.git/hooks/update -> ../../tools/check`."""
        inner = (parts, (*parts, "hooks")) if parts[-1] == ".git" else (parts,)
        for directory in inner:
            for entry in _entries(self._root, directory):
                if entry.is_symlink():
                    self._follow((*directory, entry.name))
                else:
                    with suppress(OSError):
                        self._note_inode(entry.stat(follow_symlinks=False))

    def _note_inode(self, status: os.stat_result) -> None:
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            self._linked.add((status.st_dev, status.st_ino))


def _entries(root: int, directory: Parts) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError):
        fd = os.open(
            "/".join(directory) or ".",
            os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
            dir_fd=root,
        )
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)
