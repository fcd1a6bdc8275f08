"""A frozen copy of a tree, made while the tree is in use.

The copy shares blocks with the original where the file system can do that, and keeps holes, modes,
times and hard links within it. Symlinks are copied as links, whose text means nothing on this
side. FIFOs, sockets, devices, and what the jail itself could not read are left out, and named.

The original may be written meanwhile: each file is as it was when it was copied, and its node in
the manifest says which one that was. Not seen is a write to a page that was mapped, and dirty,
already before the copy.
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
from sbx.linux.reflink import clone
from sbx.workspace.beneath import encoded
from sbx.workspace.changes import Change, Manifest, Node
from sbx.workspace.refusals import translated
from sbx.workspace.snapshot import (
    Bounds,
    Scope,
    Survey,
    digest_of,
    extents,
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


def freeze(source: Tree, target: Tree, scope: Scope, bounds: Bounds) -> tuple[Manifest, Manifest]:
    """Copy all of `source` into the new, empty tree `target`, which nobody else uses yet; what was
    copied, and what is there now. What is `reserved` is made, and given the usual mode.

    Raises TooLarge `workspace_too_large`, and what linux says of the disk.
    """
    for name in sorted(scope.reserved):
        target.make_directory(name)
    survey = Survey(source, scope, bounds)
    with translated(source.view), _Freezing(source, target, survey) as freezing:
        for name, found in survey:
            freezing.take(name, found)
        freezing.finish()
        until_ns = settle(survey)
    frozen = look(target, scope, bounds)
    return Manifest(freezing.nodes, tuple(survey.left_out), until_ns), frozen


def take(
    changed: Sequence[Change], source: Tree, target: Tree, scope: Scope, bounds: Bounds
) -> list[Change]:
    """Copy the new content of these changes from `source`, which others may still write to, into
    `target`, which only we use. Return the changes with the content that was copied, and its
    digest: what is shown of them and committed later is this content. A file that vanished
    meanwhile counts as removed.

    Raises TooLarge `workspace_too_large`.
    """
    survey = Survey(source, scope, bounds)
    taken: list[Change] = []
    with translated(source.view):
        for one in changed:
            if one.after is None or one.after.kind != "file" or not one.content:
                taken.append(one)
                continue
            try:
                taken.append(replace(one, after=_taken(one, source, target, survey)))
            except (NotFound, InvalidPath, Denied):
                if one.before is not None:
                    taken.append(Change(one.path, one.before, None))
    return taken


def _taken(one: Change, source: Tree, target: Tree, survey: Survey) -> Node:
    name = one.relative
    with source.open(name) as file:
        found = os.fstat(file.fd)
        parent = target.parent(name[:-1])
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            made = os.open(encoded(name[-1]), flags, 0o600, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            copy_content(file.fd, made, found.st_size, survey)
            size = os.fstat(made).st_size
            node = replace(file_node(found), size=size, sha256=digest_of(made, size, survey))
            give(made, node, target.owner)
        finally:
            os.close(made)
    return node


class _Freezing:
    """The copy on its way; holds one directory of the target open."""

    def __init__(self, source: Tree, target: Tree, survey: Survey) -> None:
        self._source = source
        self._target = target
        self._survey = survey
        self._owner = target.owner
        self._untold = not stamps.tells_every_write(source.fd)
        self._above: Relative | None = None
        self._parent = -1
        self._linked: dict[tuple[int, int], Relative] = {}
        self._directories: list[tuple[Relative, int]] = []
        self.nodes: dict[str, Node] = {}

    def take(self, name: Relative, found: os.stat_result) -> None:
        try:
            node: Node | None = None
            if stat.S_ISDIR(found.st_mode):
                os.mkdir(encoded(name[-1]), 0o700, dir_fd=self._into(name))
                self._directories.append((name, mode_of(found)))
                node = Node("directory", mode_of(found), identity=identity_of(found))
            elif stat.S_ISLNK(found.st_mode):
                node = self._take_link(name)
            elif stat.S_ISREG(found.st_mode):
                node = self._take_file(name)
            else:
                node = special_node(found)
        except NotFound:  # it vanished
            return
        except (InvalidPath, Denied):  # swapped for something else, or not to be read
            node = None
        if node is None or node.kind == "special":
            self._survey.leave_out(name)
        if node is not None:
            self.nodes["/".join(name)] = node

    def finish(self) -> None:
        """Give the directories away, those below first: their modes may shut us out."""
        for name, mode in reversed(self._directories):
            self._survey.check()
            fd = self._target.opener(self._target.fd, name, os.O_PATH | os.O_DIRECTORY)
            try:
                os.chmod(f"/proc/self/fd/{fd}", mode)
                if self._owner is not None:
                    os.chown(f"/proc/self/fd/{fd}", *self._owner)
            finally:
                os.close(fd)

    def _take_link(self, name: Relative) -> Node | None:
        node = link_at(self._source, name)
        if node is not None and is_item_link(node):
            raise NotFound("it belongs to one kernel")
        if node is not None and node.text is not None:
            parent, last = self._into(name), encoded(name[-1])
            os.symlink(node.text, last, dir_fd=parent)
            if self._owner is not None:
                os.chown(last, *self._owner, dir_fd=parent, follow_symlinks=False)
        return node

    def _take_file(self, name: Relative) -> Node | None:
        with self._source.open(name) as file:
            found = os.fstat(file.fd)
            if not self._survey.readable(found):
                return None
            parent, last = self._into(name), encoded(name[-1])
            key = found.st_dev, found.st_ino
            if found.st_nlink > 1 and (first := self._linked.get(key)) is not None:
                self._link_again(first, parent, last)
                return self.node_of(first, found)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            made = os.open(last, flags, 0o600, dir_fd=parent)
            try:
                copy_content(file.fd, made, found.st_size, self._survey)
                sha256 = None
                if self._untold or _is_recent(found):
                    sha256 = digest_of(made, found.st_size, self._survey)
                give(made, file_node(found), self._owner)
            finally:
                os.close(made)
        if found.st_nlink > 1:
            self._linked[key] = name
        return file_node(found, sha256)

    def node_of(self, first: Relative, found: os.stat_result) -> Node:
        return file_node(found, self.nodes["/".join(first)].sha256)

    def _link_again(self, first: Relative, parent: int, last: bytes) -> None:
        above = self._target.opener(self._target.fd, first[:-1], os.O_PATH | os.O_DIRECTORY)
        try:
            os.link(encoded(first[-1]), last, src_dir_fd=above, dst_dir_fd=parent)
        finally:
            os.close(above)

    def _into(self, name: Relative) -> int:
        """The directory of the target in which this is made. They come one after the other."""
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


def copy_content(source: int, target: int, size: int, survey: Survey | None = None) -> None:
    """Give the new file `target` the content of `source`, and its holes; at most `size` bytes of
    one that grows meanwhile. Raises OSError."""
    if clone(source, target):
        if survey is not None:
            survey.count(os.fstat(source).st_blocks * 512)
        return
    for start, end in extents(source, size):
        at = start
        while at < end:
            piece = os.pread(source, min(_CHUNK, end - at), at)
            if not piece:
                break
            if survey is not None:
                survey.check()
                survey.count(len(piece))
            rest = memoryview(piece)
            while rest:
                written = os.pwrite(target, rest, at)
                rest, at = rest[written:], at + written
    os.ftruncate(target, min(size, os.fstat(source).st_size))


def give(made: int, like: Node, owner: tuple[int, int] | None) -> None:
    """Mode, time and owner of an open file that is ours yet. Raises OSError."""
    os.utime(made, ns=(like.mtime_ns, like.mtime_ns))
    os.fchmod(made, like.mode)
    if owner is not None:
        os.fchown(made, *owner)


def keep_attributes(old: int, made: int, mode: int) -> None:
    """Give the open file `made`, which is to replace `old`, its group, its ACL and its `user.*`
    attributes. Capabilities and the like are rights of the old content. Raises OSError where one of
    them cannot be kept."""
    was, now = os.fstat(old), os.fstat(made)
    if was.st_gid != now.st_gid:
        os.fchown(made, -1, was.st_gid)
    for name in _attributes(old):
        if name == _ACL or name.startswith("user."):
            os.setxattr(made, name, os.getxattr(old, name))
    os.fchmod(made, mode)  # an ACL sets it, too


def _attributes(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return []


def settle(survey: Survey | None = None) -> int:
    """Wait until whatever is written from now on is stamped later than what was copied, and than
    the time that this gives."""
    began = stamps.now_ns()
    while stamps.now_ns() <= began:
        if survey is not None:
            survey.check()
        time.sleep(0.001)
    return began


def _is_recent(found: os.stat_result) -> bool:
    """Whether the next write could have the same time as its last one."""
    return found.st_ctime_ns > stamps.now_ns() - 2 * stamps.TICK_NS
