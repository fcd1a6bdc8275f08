"""Copy a file or a tree: build it where the code inside does not see it, then rename it.

A copy has limits for entries, bytes and time. If it exceeds one, or fails, nothing of it remains.
Symlinks are copied as links, and the host never follows them. FIFOs, sockets, devices and hard
links to files of other owners are left out.
"""

import os
import secrets
import stat
from collections.abc import Callable

from sbx.errors import InvalidPath, NotFound, TooLarge
from sbx.linux.descriptors import closing
from sbx.linux.renameat2 import rename_new
from sbx.protocol.files import Copied
from sbx.workspace.errors import invalid_path, not_a_file, too_large, translated, wrong_path
from sbx.workspace.rmtree import remove_tree
from sbx.workspace.safe_open import encoded
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

ENTRIES_MAX = 100_000
DEADLINE_S = 60.0
_REMOVE_S = 30.0


def copy(
    source: Tree,
    of: Relative,
    target: Tree,
    to: Relative,
    *,
    file_max: int,
    total_max: int,
    overwrite: bool,
    entries_max: int | None = None,
    deadline_s: float | None = None,
    check: Callable[[Tree], None] | None = None,
) -> Copied:
    """Copy the path `of` to the path `to`, and create the missing parent directories.

    With `overwrite`, a file replaces a file of that name. A directory never replaces anything.
    `check` receives a copied directory before it gets its name, and raises to refuse it. Raises
    NotFound, Conflict `file_exists`, TooLarge `file_too_large` and `tree_too_large`, and the errors
    of `Tree.write`.
    """
    refuse_into_itself(source, of, target, to)
    kind = source.stat(of).kind
    if kind == "file":
        max_bytes = min(file_max, total_max)
        size = copy_file(source, of, target, to, max_bytes=max_bytes, new=not overwrite)
        return Copied(1, size, complete=True)
    if kind == "symlink":
        raise wrong_path(source.shown(of), "symlink", "is a symlink, which the host never follows")
    if kind != "directory":
        raise not_a_file(source.shown(of))
    entries_max = ENTRIES_MAX if entries_max is None else entries_max
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    copying = _Copying(source, of, target, to, file_max, total_max, entries_max, deadline_s)
    return copying.run(check)


def refuse_into_itself(source: Tree, of: Relative, target: Tree, to: Relative) -> None:
    if source is target and to[: len(of)] == of:
        raise invalid_path(
            "into_itself", f"'{target.shown(to)}' lies in '{source.shown(of)}' itself"
        )


def copy_file(
    source: Tree, of: Relative, target: Tree, to: Relative, *, max_bytes: int, new: bool
) -> int:
    """Copy a file and return its size in bytes; ignore bytes appended since the file was opened."""
    with source.open(of) as file:
        if file.size > max_bytes:
            raise too_large(file.path, max_bytes)
        # The mode of an upload is read-only, but a copy must be writable.
        mode = stat.S_IMODE(os.fstat(file.fd).st_mode) & 0o777 | 0o600
        return target.write(to, file.chunks(), max_bytes=max_bytes, mode=mode, new=new)


class _Copying:
    def __init__(
        self,
        source: Tree,
        of: Relative,
        target: Tree,
        to: Relative,
        file_max: int,
        total_max: int,
        entries_max: int,
        deadline_s: float,
    ) -> None:
        self._source = source
        self._of = of
        self._target = target
        self._to = to
        self._file_max = file_max
        self._total_max = total_max
        self._entries_max = entries_max
        self._deadline_s = deadline_s
        self._walk = Walk(max_entries=entries_max, deadline_s=deadline_s)
        self._files = 0
        self._bytes = 0
        self._complete = True

    def run(self, check: Callable[[Tree], None] | None) -> Copied:
        shown = self._target.shown(self._to)
        with translated(shown):
            parent = self._target.parent(self._to[:-1])
        with closing(parent):
            name = encoded(self._to[-1])
            with _Staged(self._target, parent) as staged:
                self._fill(staged.tree)
                if check is not None:
                    check(staged.tree)
                with translated(shown):
                    staged.commit(parent, name)
        return Copied(self._files, self._bytes, self._complete and self._walk.complete)

    def _fill(self, tree: Tree) -> None:
        for below, status in self._source.walk(self._walk, self._of):
            self._copy_entry(below, status, tree, below[len(self._of) :])
        if not self._walk.in_time:
            what = f"takes longer than {self._deadline_s:g} s"
            raise _tree_too_large(what, self._deadline_s)
        if self._walk.exhausted:
            what = f"has more than {self._entries_max} entries"
            raise _tree_too_large(what, self._entries_max)

    def _copy_entry(self, of: Relative, status: os.stat_result, tree: Tree, to: Relative) -> None:
        try:
            if stat.S_ISDIR(status.st_mode):
                tree.make_directory(to)
            elif stat.S_ISLNK(status.st_mode):
                self._copy_link(of, tree, to)
            elif stat.S_ISREG(status.st_mode):
                self._copy_file(of, tree, to)
            else:
                self._complete = False
        except NotFound:  # it vanished
            return
        except InvalidPath:  # replaced by a node that is not copied
            self._complete = False

    def _copy_file(self, of: Relative, tree: Tree, to: Relative) -> None:
        remaining = self._total_max - self._bytes
        try:
            size = copy_file(
                self._source, of, tree, to, max_bytes=min(self._file_max, remaining), new=False
            )
        except TooLarge:
            if remaining < self._file_max:
                what = f"has more than the {self._total_max} bytes that are free"
                raise _tree_too_large(what, self._total_max) from None
            raise
        self._bytes += size
        self._files += 1

    def _copy_link(self, of: Relative, tree: Tree, to: Relative) -> None:
        with translated(self._source.shown(of)):
            with closing(self._source.hold(of)) as fd:
                text = os.readlink(b"", dir_fd=fd)
            with closing(tree.parent(to[:-1])) as above:
                os.symlink(text, encoded(to[-1]), dir_fd=above)


class _Staged:
    """A directory with a temporary name until `commit` gives it its real name.

    Leaving the context without a commit removes it.
    """

    def __init__(self, target: Tree, parent: int) -> None:
        self._directory = parent if target.staging is None else target.staging
        self._name = f".sbx-{secrets.token_hex(16)}"
        self._owner = target.owner
        self._committed = False
        with translated(target.view):
            os.mkdir(self._name, 0o700, dir_fd=self._directory)
            fd = os.open(
                self._name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._directory
            )
        self.tree = Tree(fd, view=target.view, owner=target.owner, staging=target.staging)
        self.tree.durable = False  # as cp(1): do not sync a tree file by file

    def commit(self, parent: int, name: bytes) -> None:
        if self._owner is not None and os.fstat(self.tree.fd).st_uid == os.geteuid():
            os.fchown(self.tree.fd, *self._owner)
        os.fchmod(self.tree.fd, 0o755)
        rename_new(self._directory, os.fsencode(self._name), parent, name)
        self._committed = True

    def __enter__(self) -> "_Staged":
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.close()
        if not self._committed:
            remove_tree(self._directory, self._name, _REMOVE_S)


def _tree_too_large(what: str, limit: float) -> TooLarge:
    return TooLarge(
        f"the directory {what}",
        code="tree_too_large",
        hint="copy its parts one by one, or have the code inside copy it",
        details={"limit": limit},
    )
