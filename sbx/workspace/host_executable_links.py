"""Find the files that an existing host executable of a directory leads to, by a link or its text.

The path guard protects names. These cases need a look at the directory before a kernel starts:

    symlink      `.envrc -> config/envrc`: protect the target like the name
    hard link    a protected file with a second name: protect it by its inode
    git config   `core.hooksPath = tools/hooks`, `core.fsmonitor`, drivers, `include.path`: protect
                 each file or directory of the tree that a value names, even if it does not exist
                 yet. In the user's own settings, each relative path counts. Protect
                 `.gitattributes` if a driver is defined
    .envrc       the files that it reads, the directories that it adds to PATH
    hooks        the files that hooks of git, husky, pre-commit and lefthook execute.
                 `executed_words` has the rule for words of commands: `npm test`, `make` and the
                 arguments of a linter do not count. A Python program imports modules from its own
                 directory, and `python -m` from the working directory: there, modules that shadow
                 the standard library count
    environment  a directory with `pyvenv.cfg`: its path stays protected after a move

Repositories and `.envrc` files above the directory count too, because git and direnv search the
parent directories.

The walk follows no symlink. It has limits, which code inside can exhaust. Therefore it first looks
up the names of the table in the directory itself. In a large directory, it looks them up before it
reads the rest of the entries. `ContextKernel` repeats the walk while code runs.
"""

import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct, field

from sbx.guest.path_rules import Parts, PathRules, fold
from sbx.linux.descriptors import closing
from sbx.workspace.host_executable_texts import (
    HOOK_CONFIGURATIONS,
    HOOK_DIRECTORIES,
    HostExecutableTexts,
)

ENTRIES_MAX = 100_000
DEADLINE_S = 3.0
_TURN = 1_000  # entries of one directory before the next directory has its turn
_ABOVE = (".git", ".envrc", *HOOK_DIRECTORIES, *HOOK_CONFIGURATIONS)


class ExecutableLinks(Struct):
    """The result of a walk.

    `aliases` are further paths to protect. `import_roots` are directories from which a host
    executable in Python imports its modules; "" is the directory itself. `linked` has (device,
    inode) of protected files with more than one name. `protected` has the existing names of the
    table. `drivers`: a git configuration defines a driver. `complete`: the walk saw the whole
    directory.
    """

    aliases: set[str] = field(default_factory=set)
    import_roots: set[str] = field(default_factory=set)
    linked: set[tuple[int, int]] = field(default_factory=set)
    protected: list[str] = field(default_factory=list)
    drivers: bool = False
    complete: bool = True

    def add(self, earlier: "ExecutableLinks") -> None:
        """Add the results of an earlier walk, except its `protected` and `complete`."""
        self.aliases |= earlier.aliases
        self.import_roots |= earlier.import_roots
        self.linked |= earlier.linked
        self.drivers = self.drivers or earlier.drivers


def find_links(root: int, rules: PathRules) -> ExecutableLinks:
    """Walk the directory fd `root`. Blocks for at most `DEADLINE_S` seconds."""
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
        """Look at configuration outside of the directory that applies to it."""
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
        """Look up the exact names of the table, without a walk over the entries."""
        for name in self._rules.exact_names:
            parts = (*directory, name)
            with suppress(OSError):
                mode = os.lstat("/".join(parts), dir_fd=self._root).st_mode
                if self._rules.match_name(parts) is not None:
                    self._take(parts, mode)

    def look_at_entries(self, until: float) -> None:
        """Walk breadth first, and take `_TURN` entries of a large directory at a time."""
        seen, rules_for = 0, self._rules.rules_for
        pending: deque[tuple[Parts, Iterator[os.DirEntry[str]] | None]] = deque([((), None)])
        while pending:
            directory, rest = pending.popleft()
            entries = rest or _entries(self._root, directory)
            parent = fold(directory[-1]) if directory else ""
            last = seen + _TURN
            for entry in entries:
                seen += 1
                if seen > ENTRIES_MAX or time.monotonic() > until:
                    self._complete = False
                    return
                name = entry.name
                if name != "pyvenv.cfg" and not rules_for(fold(name), parent):
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
        """Look at an entry whose name is in the table; return whether to walk into it."""
        parts = (*directory, entry.name)
        if entry.name == "pyvenv.cfg" and directory:
            self._aliases.paths.add("/".join(directory))
        if self._rules.match_name(parts) is None:
            return entry.is_dir(follow_symlinks=False)
        with suppress(OSError):
            self._take(parts, entry.stat(follow_symlinks=False).st_mode)
        return False

    def _take(self, parts: Parts, mode: int) -> None:
        """Follow a protected symlink, look into a protected directory, read a protected file."""
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
        """Protect the target of a protected symlink if it is in the directory."""
        self._aliases.protect(os.path.join(self._top, *parts))
        self._aliases.paths.discard("/".join(parts))  # its name protects it already

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
    with (
        suppress(OSError),
        closing(
            os.open(
                "/".join(directory) or ".",
                os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                dir_fd=root,
            )
        ) as fd,
        os.scandir(fd) as entries,
    ):
        yield from entries
