"""A frozen copy of a tree, made while the tree is in use.

The copy shares blocks with the original if the file system supports that. It keeps holes, modes,
times, and hard links within the tree. Symlinks are copied as links, and the host never follows
them. FIFOs, sockets, devices and files that the jail itself cannot read are left out and listed.

Code may write to the original during the copy. Each file has its content at the time when it was
copied, and its node in the manifest identifies that version. One write goes unnoticed: a write to a
page that was mapped and dirty already before the copy.
"""

import errno
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from sbx.errors import Denied, InvalidPath, NotFound
from sbx.linux import stamps
from sbx.linux.descriptors import closing
from sbx.linux.reflink import clone
from sbx.workspace.errors import translated
from sbx.workspace.safe_open import encoded
from sbx.workspace.snapshots.manifest import FileNode, Manifest, PlannedChange
from sbx.workspace.snapshots.scan import (
    Bounds,
    ScanScope,
    TreeScan,
    data_ranges,
    digest_of,
    file_node,
    identity_of,
    is_item_link,
    link_at,
    look,
    mode_of,
    special_node,
)
from sbx.workspace.tree import Relative, Tree

_CHUNK = 1 << 20
_ACL = "system.posix_acl_access"


def freeze(
    source: Tree, target: Tree, scope: ScanScope, bounds: Bounds
) -> tuple[Manifest, Manifest]:
    """Copy all of `source` into the new, empty tree `target`, which no other process uses yet.

    Return the manifest of the copied files of `source`, and the manifest of `target`. The reserved
    directories are created with the usual mode. Raises TooLarge `workspace_too_large`, and the
    errors of the disk.
    """
    for name in sorted(scope.reserved):
        target.make_directory(name)
    survey = TreeScan(source, scope, bounds)
    with translated(source.view), _Freezing(source, target, survey) as freezing:
        for name, status in survey:
            freezing.take(name, status)
        freezing.finish()
        until_ns = settle(survey)
    frozen = look(target, scope, bounds)
    return Manifest(freezing.nodes, tuple(survey.left_out), until_ns), frozen


def take(
    changed: Sequence[PlannedChange], source: Tree, target: Tree, scope: ScanScope, bounds: Bounds
) -> list[PlannedChange]:
    """Copy the new content of these changes from `source` into `target`, which only sbx uses.

    Other processes may still write to `source`. Return the changes with the size and the digest of
    the copied content. A user reviews this content, and a commit uses it. A file that disappeared
    in the meantime counts as removed. Raises TooLarge `workspace_too_large`.
    """
    survey = TreeScan(source, scope, bounds)
    taken: list[PlannedChange] = []
    with translated(source.view):
        for change in changed:
            if change.after is None or change.after.kind != "file" or not change.content:
                taken.append(change)
                continue
            try:
                taken.append(replace(change, after=_take_change(change, source, target, survey)))
            except (NotFound, InvalidPath, Denied):
                if change.before is not None:
                    taken.append(PlannedChange(change.path, change.before, None))
    return taken


def _take_change(change: PlannedChange, source: Tree, target: Tree, survey: TreeScan) -> FileNode:
    name = change.relative
    with source.open(name) as file:
        status = os.fstat(file.fd)
        with closing(target.parent(name[:-1])) as parent:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            new_fd = os.open(encoded(name[-1]), flags, 0o600, dir_fd=parent)
        with closing(new_fd):
            copy_content(file.fd, new_fd, status.st_size, survey)
            size = os.fstat(new_fd).st_size
            node = replace(file_node(status), size=size, sha256=digest_of(new_fd, size, survey))
            give(new_fd, node, target.owner)
    return node


class _Freezing:
    """A copy in progress. It keeps one directory of the target open."""

    def __init__(self, source: Tree, target: Tree, survey: TreeScan) -> None:
        self._source = source
        self._target = target
        self._survey = survey
        self._owner = target.owner
        self._needs_digests = not stamps.tells_every_write(source.fd)
        self._above: Relative | None = None
        self._parent = -1
        self._linked: dict[tuple[int, int], Relative] = {}
        self._directories: list[tuple[Relative, int]] = []
        self.nodes: dict[str, FileNode] = {}

    def take(self, name: Relative, status: os.stat_result) -> None:
        try:
            node: FileNode | None = None
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(encoded(name[-1]), 0o700, dir_fd=self._into(name))
                self._directories.append((name, mode_of(status)))
                node = FileNode("directory", mode_of(status), identity=identity_of(status))
            elif stat.S_ISLNK(status.st_mode):
                node = self._take_link(name)
            elif stat.S_ISREG(status.st_mode):
                node = self._take_file(name)
            else:
                node = special_node(status)
        except NotFound:  # it vanished
            return
        except (InvalidPath, Denied):  # replaced by another node, or not readable
            node = None
        if node is None or node.kind == "special":
            self._survey.leave_out(name)
        if node is not None:
            self.nodes["/".join(name)] = node

    def finish(self) -> None:
        """Set modes and owners of directories, children first: a mode may deny us access."""
        for name, mode in reversed(self._directories):
            self._survey.check()
            with closing(
                self._target.opener(self._target.fd, name, os.O_PATH | os.O_DIRECTORY)
            ) as fd:
                os.chmod(f"/proc/self/fd/{fd}", mode)
                if self._owner is not None:
                    os.chown(f"/proc/self/fd/{fd}", *self._owner)

    def _take_link(self, name: Relative) -> FileNode | None:
        node = link_at(self._source, name)
        if node is not None and is_item_link(node):
            raise NotFound("the link belongs to one kernel")
        if node is not None and node.text is not None:
            parent, last = self._into(name), encoded(name[-1])
            os.symlink(node.text, last, dir_fd=parent)
            if self._owner is not None:
                os.chown(last, *self._owner, dir_fd=parent, follow_symlinks=False)
        return node

    def _take_file(self, name: Relative) -> FileNode | None:
        with self._source.open(name) as file:
            status = os.fstat(file.fd)
            if not self._survey.readable(status):
                return None
            parent, last = self._into(name), encoded(name[-1])
            key = status.st_dev, status.st_ino
            if status.st_nlink > 1 and (first := self._linked.get(key)) is not None:
                self._link_again(first, parent, last)
                return self.node_of(first, status)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with closing(os.open(last, flags, 0o600, dir_fd=parent)) as new_fd:
                copy_content(file.fd, new_fd, status.st_size, self._survey)
                sha256 = None
                if self._needs_digests or _is_recent(status):
                    sha256 = digest_of(new_fd, status.st_size, self._survey)
                give(new_fd, file_node(status), self._owner)
        if status.st_nlink > 1:
            self._linked[key] = name
        return file_node(status, sha256)

    def node_of(self, first: Relative, status: os.stat_result) -> FileNode:
        return file_node(status, self.nodes["/".join(first)].sha256)

    def _link_again(self, first: Relative, parent: int, last: bytes) -> None:
        with closing(
            self._target.opener(self._target.fd, first[:-1], os.O_PATH | os.O_DIRECTORY)
        ) as above:
            os.link(encoded(first[-1]), last, src_dir_fd=above, dst_dir_fd=parent)

    def _into(self, name: Relative) -> int:
        """Return the target directory for this name; it stays open for the next names in it."""
        if name[:-1] != self._above:
            self._close()
            flags = os.O_RDONLY | os.O_DIRECTORY
            self._parent = self._target.opener(self._target.fd, name[:-1], flags)
            self._above = name[:-1]
        return self._parent

    def _close(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
        self._parent, self._above = -1, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def copy_content(source: int, target: int, size: int, survey: TreeScan | None = None) -> None:
    """Copy the content of `source`, with its holes, to the new file `target`. Raises OSError.

    If the file grows during the copy, at most `size` bytes are copied.
    """
    if clone(source, target):
        if survey is not None:
            survey.count(os.fstat(source).st_blocks * 512)
        return
    for start, end in data_ranges(source, size):
        at = start
        while at < end:
            piece = os.pread(source, min(_CHUNK, end - at), at)
            if not piece:
                break
            if survey is not None:
                survey.check()
                survey.count(len(piece))
            remaining = memoryview(piece)
            while remaining:
                written = os.pwrite(target, remaining, at)
                remaining, at = remaining[written:], at + written
    os.ftruncate(target, min(size, os.fstat(source).st_size))


def give(fd: int, like: FileNode, owner: tuple[int, int] | None) -> None:
    """Set mode, time and owner of an open file that this process still owns. Raises OSError."""
    os.utime(fd, ns=(like.mtime_ns, like.mtime_ns))
    os.fchmod(fd, like.mode)
    if owner is not None:
        os.fchown(fd, *owner)


def keep_attributes(old: int, new: int, mode: int) -> None:
    """Copy the group, the ACL and the `user.*` attributes of `old` to `new`, which replaces it.

    Both are open files. File capabilities and similar attributes are rights of the old content, so
    they are not copied. Raises OSError if an attribute cannot be kept.
    """
    old_status, new_status = os.fstat(old), os.fstat(new)
    if old_status.st_gid != new_status.st_gid:
        os.fchown(new, -1, old_status.st_gid)
    for name in _attributes(old):
        if name == _ACL or name.startswith("user."):
            os.setxattr(new, name, os.getxattr(old, name))
    os.fchmod(new, mode)  # setting an ACL changes the mode, too


def _attributes(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return []


def settle(survey: TreeScan | None = None) -> int:
    """Wait for the next clock tick, and return the time at the start in ns.

    Each later write has a ctime after the returned time and after those of the copied files.
    """
    started_ns = stamps.now_ns()
    while stamps.now_ns() <= started_ns:
        if survey is not None:
            survey.check()
        time.sleep(0.001)
    return started_ns


def _is_recent(status: os.stat_result) -> bool:
    """Return whether the next write could get the same ctime as the last one."""
    return status.st_ctime_ns > stamps.now_ns() - 2 * stamps.TICK_NS
