"""Make changes in a tree that others use meanwhile: all of them, or none.

    check     everything that the changes touch is there as it is expected; nothing else matters
    stage     what is to come is made whole beside the tree, where only we see it
    do        renames and the like, each with what undoes it; looked at once more where a rename
              shows that somebody was quicker
    undo      after any failure, last first

Between the first rename and the last the code inside may see some of the changes and not the
others, since linux renames one name at a time. There is no journal: a runtime that is killed in
between, or a machine that loses its power, leaves a part of the changes made, each file of them
whole. What was to be removed or replaced may be gone then; in a directory of the host it may be in
one of the name `.sbx-` and 32 hex digits, which is the user's to look at and to remove.
"""

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sbx.errors import Broken, Conflict, Denied, InvalidPath, NotFound, SbxError
from sbx.linux.renameat2 import exchange, rename_new
from sbx.workspace.beneath import encoded
from sbx.workspace.changes import Change, Node, Nodes
from sbx.workspace.freezing import copy_content, give
from sbx.workspace.refusals import translate, translated
from sbx.workspace.removal import remove_held
from sbx.workspace.snapshot import digest, node_at
from sbx.workspace.tree import Tree

_log = logging.getLogger(__name__)
_REMOVE_S = 30.0
_NOT_AS_IT_WAS = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOTEMPTY,
        errno.ELOOP,
        errno.EXDEV,
    }
)


def commit(
    changed: Sequence[Change], expected: Nodes, target: Tree, source: Tree, *, staging: int | None
) -> None:
    """Make these changes, in the order of `changes`, in `target`; files get the content that they
    have in `source`.

    `expected`: what `target` held when the changes were decided. `staging`: a directory on the same
    mount and in no view; without one it is done in the tree itself, under a temporary name.

    Raises Conflict `workspace_changed`, Denied `file_not_permitted`, Unavailable `no_space` and
    `io_error`; nothing is changed then. Broken `commit_not_undone` where that failed, too.
    """
    if changed:
        where = target.fd if staging is None else staging
        with _staging(target, where) as stage:
            _Commit(changed, expected, target, source, stage).run()


@contextmanager
def _staging(target: Tree, where: int) -> Iterator[int]:
    """A directory of our own, removed at the end; unless it holds what could not be put back."""
    name = f".sbx-{secrets.token_hex(16)}"
    with translated(target.view):
        os.mkdir(name, 0o700, dir_fd=where)
        stage = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=where)
    keep = False
    try:
        yield stage
    except Broken:
        keep = True
        raise
    finally:
        if not keep:
            remove_held(stage, where, name, _REMOVE_S)
        os.close(stage)


class _Commit:
    def __init__(
        self, changed: Sequence[Change], expected: Nodes, target: Tree, source: Tree, stage: int
    ) -> None:
        self._changed = changed
        self._expected = expected
        self._target = target
        self._source = source
        self._stage = stage
        self._made = {one.path for one in changed if one.before is None}
        self._undo: list[Callable[[], object]] = []
        self._new: dict[str, bytes] = {}
        self._linked: dict[int, bytes] = {}
        self._serial = 0

    def run(self) -> None:
        for one in self._changed:
            self._check(one)
        for one in self._changed:
            if one.after is not None and one.content and one.after.kind != "directory":
                with self._about(self._source, one, foreign=True):
                    self._new[one.path] = self._make(one, one.after)
        try:
            for act, one in self._acts():
                with self._about(self._target, one):
                    act(one)
        except BaseException as error:
            self._undo_all(error)
            raise

    def _acts(self) -> Iterator[tuple[Callable[[Change], None], Change]]:
        """A directory can be written while it lasts, and is there before what lies in it."""
        every = self._changed
        directories = [one for one in every if one.node.kind == "directory"]
        directories = sorted([*directories, *self._narrow()], key=lambda one: one.relative)
        others = [one for one in every if one.node.kind != "directory"]
        yield from ((self._lift, one) for one in directories if one.before is not None)
        yield from ((self._take_away, one) for one in others if one.after is None)
        yield from ((self._remove, one) for one in reversed(directories) if one.after is None)
        yield from ((self._make_directory, one) for one in directories if one.before is None)
        yield from ((self._put, one) for one in others if one.before is None)
        replaced = [one for one in others if one.kind == "changed"]
        yield from ((self._replace, one) for one in replaced if one.content)
        yield from ((self._restamp, one) for one in replaced if not one.content)
        yield from ((self._set_mode, one) for one in reversed(directories) if one.after is not None)

    def _narrow(self) -> Iterator[Change]:
        """The directories that stay as they are, and do not let their owner write into them: code
        inside has changed the mode and changed it back."""
        changed = {one.path for one in self._changed}
        for path in sorted({one.path.rpartition("/")[0] for one in self._changed} - changed):
            node = self._expected.get(path)
            if node is not None and node.kind == "directory" and node.mode & 0o700 != 0o700:
                yield Change(path, node, node)

    # -- check ----------------------------------------------------------------------------------

    def _check(self, one: Change) -> None:
        with self._about(self._target, one):
            expected = self._expected.get(one.path)
            if one.before is None and expected is not None:
                return  # it was another kind of thing, whose removal is checked
            if one.path.rpartition("/")[0] in self._made:
                return  # nothing can be there: what lies above is checked
            found = node_at(self._target, one.relative)
            if one.before is None:
                if found is not None:
                    raise _changed(self._target, one)
                return
            if expected is None or found is None or not self._is_same(one, expected, found):
                raise _changed(self._target, one)

    def _is_same(self, one: Change, expected: Node, found: Node) -> bool:
        if expected.kind == "directory":
            same = found.kind == "directory" and found.identity[0] == expected.identity[0]
            return same and (one.after is None or found.mode == expected.mode)
        if expected.kind == "special":  # its times are those of its last use
            return found.kind == "special" and found.identity[0] == expected.identity[0]
        if found != expected or found.identity != expected.identity:
            return False
        return expected.sha256 in (None, digest(self._target, one.relative))

    # -- stage ----------------------------------------------------------------------------------

    def _make(self, one: Change, after: Node) -> bytes:
        name = self._name()
        owner = self._target.owner
        if after.text is not None:
            os.symlink(after.text, name, dir_fd=self._stage)
            if owner is not None:
                os.chown(name, *owner, dir_fd=self._stage, follow_symlinks=False)
            return name
        with self._source.open(one.relative) as file:
            found = os.fstat(file.fd)
            if (first := self._linked.get(found.st_ino)) is not None:
                os.link(first, name, src_dir_fd=self._stage, dst_dir_fd=self._stage)
                return name
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            made = os.open(name, flags, 0o600, dir_fd=self._stage)
            try:
                copy_content(file.fd, made, after.size)
                give(made, after, owner)
            finally:
                os.close(made)
            if found.st_nlink > 1:
                self._linked[found.st_ino] = name
        return name

    def _name(self) -> bytes:
        self._serial += 1
        return b"%d" % self._serial

    # -- do -------------------------------------------------------------------------------------

    def _lift(self, one: Change) -> None:
        """Let us write into a directory whose mode may forbid it, or that is to be removed."""
        with self._held(one) as fd:
            mode = os.fstat(fd).st_mode & 0o777
            if mode | 0o700 != mode:
                os.chmod(f"/proc/self/fd/{fd}", mode | 0o700)
                self._then(lambda: self._chmod(one, mode))

    def _take_away(self, one: Change) -> None:
        old = self._name()
        with self._above(one) as (parent, last):
            os.rename(last, old, src_dir_fd=parent, dst_dir_fd=self._stage)
        self._then(lambda: self._put_back(one, old))
        self._check_taken(one, old)

    def _remove(self, one: Change) -> None:
        assert one.before is not None
        mode = one.before.mode
        with self._above(one) as (parent, last):
            os.rmdir(last, dir_fd=parent)
        self._then(lambda: self._make_one(one, mode))

    def _make_directory(self, one: Change) -> None:
        self._make_one(one, 0o700)
        self._then(lambda: self._remove_made(one))

    def _put(self, one: Change) -> None:
        new = self._new[one.path]
        self._put_back(one, new)
        self._then(lambda: self._take_back(one, new))

    def _replace(self, one: Change) -> None:
        new = self._new[one.path]
        with self._above(one) as (parent, last):
            if not exchange(self._stage, new, parent, last):
                self._take_away(one)
                self._put(one)
                return
        self._then(lambda: self._change_back(one, new))
        self._check_taken(one, new)

    def _restamp(self, one: Change) -> None:
        """Mode and time of a file whose content stays."""
        before, after = one.before, one.after
        assert before is not None
        assert after is not None
        with self._held(one) as fd:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (self._expected[one.path].identity[0], before.size):
                raise _changed(self._target, one)
            self._then(lambda: self._stamp(one, before))
            _stamped(fd, after)

    def _set_mode(self, one: Change) -> None:
        assert one.after is not None
        mode = one.after.mode
        before = self._chmod(one, mode)
        self._then(lambda: self._chmod(one, before | 0o700))

    # -- each of them, and back -----------------------------------------------------------------

    def _then(self, back: Callable[[], object]) -> None:
        self._undo.append(back)

    def _undo_all(self, cause: BaseException) -> None:
        failed: list[Exception] = []
        while self._undo:
            try:
                self._undo.pop()()
            except (OSError, SbxError) as error:
                failed.append(error)
        if failed:  # one line of the log, however many steps code inside has made fail
            told = "%d changes of a workspace could not be undone, the first of them:"
            _log.error(told, len(failed), exc_info=failed[0])
            raise Broken(
                "the changes were made in part: what stopped them stopped undoing them, too",
                code="commit_not_undone",
                hint="look at the files; the service's log says what failed first",
            ) from cause

    def _put_back(self, one: Change, staged: bytes) -> None:
        with self._above(one) as (parent, last):
            rename_new(self._stage, staged, parent, last)

    def _take_back(self, one: Change, staged: bytes) -> None:
        with self._above(one) as (parent, last):
            os.rename(last, staged, src_dir_fd=parent, dst_dir_fd=self._stage)

    def _change_back(self, one: Change, staged: bytes) -> None:
        with self._above(one) as (parent, last):
            exchange(self._stage, staged, parent, last)

    def _check_taken(self, one: Change, staged: bytes) -> None:
        """What we hold now is what was checked: nobody put another one there in between. Its ctime
        is that of the rename."""
        expected = self._expected[one.path]
        found = os.stat(staged, dir_fd=self._stage, follow_symlinks=False)
        if found.st_ino != expected.identity[0] or (
            expected.kind == "file"
            and (found.st_size, found.st_mtime_ns) != (expected.size, expected.mtime_ns)
        ):
            raise _changed(self._target, one)

    def _make_one(self, one: Change, mode: int) -> None:
        with self._above(one) as (parent, last):
            os.mkdir(last, 0o700, dir_fd=parent)
            try:
                with self._held(one, foreign=True) as fd:
                    if self._target.owner is not None:
                        os.chown(f"/proc/self/fd/{fd}", *self._target.owner)
                    os.chmod(f"/proc/self/fd/{fd}", mode)
            except BaseException:
                os.rmdir(last, dir_fd=parent)
                raise

    def _remove_made(self, one: Change) -> None:
        with self._above(one) as (parent, last):
            os.rmdir(last, dir_fd=parent)

    def _chmod(self, one: Change, mode: int) -> int:
        """The mode that it had."""
        with self._held(one) as fd:
            before = os.fstat(fd).st_mode & 0o777
            if before != mode:
                os.chmod(f"/proc/self/fd/{fd}", mode)
        return before

    def _stamp(self, one: Change, like: Node) -> None:
        with self._held(one) as fd:
            _stamped(fd, like)

    @contextmanager
    def _above(self, one: Change) -> Iterator[tuple[int, bytes]]:
        """The directory that has the name, and the name in it."""
        name = one.relative
        parent = self._target.opener(self._target.fd, name[:-1], os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._demand_own(parent, one)
            yield parent, encoded(name[-1])
        finally:
            os.close(parent)

    @contextmanager
    def _held(self, one: Change, *, foreign: bool = False) -> Iterator[int]:
        """It itself, and no symlink of that name."""
        flags = os.O_PATH | (os.O_DIRECTORY if one.node.kind == "directory" else 0)
        fd = self._target.opener(self._target.fd, one.relative, flags)
        try:
            if not foreign:
                self._demand_own(fd, one)
            yield fd
        finally:
            os.close(fd)

    def _demand_own(self, fd: int, one: Change) -> None:
        """Where the host has more rights than the jail, it does not lend them."""
        owner = self._target.owner
        if owner is not None and os.fstat(fd).st_uid != owner[0]:
            raise Denied(
                f"'{self._target.shown(one.relative)}' or its directory belongs to another user",
                code="file_not_permitted",
                hint="only files of the sandbox's own can be changed",
            )

    @contextmanager
    def _about(self, tree: Tree, one: Change, *, foreign: bool = False) -> Iterator[None]:
        """Errors of linux, told. `foreign`: of what nobody else can change."""
        try:
            yield
        except (NotFound, InvalidPath) as error:
            raise _changed(tree, one) from error
        except OSError as error:
            if error.errno in _NOT_AS_IT_WAS and not foreign:
                raise _changed(tree, one) from error
            raise translate(error, tree.shown(one.relative)) from error


def _stamped(fd: int, like: Node) -> None:
    place = f"/proc/self/fd/{fd}"
    os.chmod(place, like.mode)
    os.utime(place, ns=(like.mtime_ns, like.mtime_ns))


def _changed(tree: Tree, one: Change) -> Conflict:
    path = tree.shown(one.relative)
    return Conflict(
        f"'{path}' has changed meanwhile, so nothing was done",
        code="workspace_changed",
        hint="look at what it is now, and rehearse the command again",
        details={"path": path},
    )
