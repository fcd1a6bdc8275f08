"""Survey the content of a tree at one moment. Limits apply, because code inside built the tree."""

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sbx.errors import Closed, Conflict, Denied, InvalidPath, NotFound, TooLarge
from sbx.guest.guarded_paths import ITEMS
from sbx.linux import stamps
from sbx.linux.descriptors import closing
from sbx.workspace.errors import translated
from sbx.workspace.snapshots.manifest import FileNode, Manifest, PlannedChange
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

_ITEMS = f"{ITEMS}/".encode()

ENTRIES_MAX = 100_000
DEADLINE_S = 30.0
_NAMES_MAX = 32 << 20  # bytes of all paths together: a deep tree has long paths
_PATH_MAX = 4000  # bytes; the limit of openat2(2) is 4095
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class ScanScope:
    """The relevant part of a tree.

    `reserved` names belong to the workspace itself and do not change. Below `mounted` names, the
    code inside sees another tree.
    """

    reserved: tuple[Relative, ...] = ()
    mounted: tuple[Relative, ...] = ()

    def has(self, name: Relative) -> bool:
        return name not in self.reserved and not any(
            len(name) > len(top) and name[: len(top)] == top for top in self.mounted
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a survey: allocated bytes, number of entries, and time of one pass.

    Setting `stopped` cancels it.
    """

    bytes_max: int
    entries_max: int = ENTRIES_MAX
    deadline_s: float = DEADLINE_S
    stopped: threading.Event = field(default_factory=threading.Event)


class TreeScan:
    """One pass over a tree. Raises TooLarge `workspace_too_large`, and Closed if it is stopped."""

    def __init__(self, tree: Tree, scope: ScanScope, bounds: Bounds) -> None:
        self._tree = tree
        self._scope = scope
        self._bounds = bounds
        self._walk = Walk(max_entries=bounds.entries_max, deadline_s=bounds.deadline_s)
        self._closed: set[Relative] = set()
        self._bytes = 0
        self._names = 0
        self.left_out: list[str] = []

    def __iter__(self) -> Iterator[tuple[Relative, os.stat_result]]:
        for name, status in self._tree.walk(self._walk):
            self.check()
            if not self._scope.has(name) or self._is_closed(name, status):
                continue
            size = len("/".join(name).encode("utf-8", "surrogateescape"))
            self._names += size
            if size > _PATH_MAX or self._names > _NAMES_MAX:
                raise _too_large(f"has paths of more than {_PATH_MAX} bytes, or too many", size)
            yield name, status
        self.check()
        if self._walk.exhausted:
            limit = self._bounds.entries_max
            raise _too_large(f"has more than {limit} files and directories", limit)

    def check(self) -> None:
        if self._bounds.stopped.is_set():
            raise Closed("the copy was cancelled")
        if not self._walk.in_time:
            limit = self._bounds.deadline_s
            raise _too_large(f"takes longer than {limit:g} s to copy or to compare", limit)

    def count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._bounds.bytes_max:
            limit = self._bounds.bytes_max
            raise _too_large(f"has more than {limit} bytes", limit)

    def leave_out(self, name: Relative) -> None:
        self.left_out.append("/".join(name))

    def readable(self, status: os.stat_result) -> bool:
        """Return whether the jail can read the node; without an owner, whether this process can."""
        needed = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
        owner = self._tree.owner
        if owner is None:
            if (uid := os.geteuid()) == 0:
                return True
            ours = status.st_gid in (os.getegid(), *os.getgroups())
            shift = 6 if status.st_uid == uid else 3 if ours else 0
        elif status.st_uid == owner[0]:
            return True
        else:
            shift = 3 if status.st_gid == owner[1] else 0
        return status.st_mode >> shift & needed == needed

    def _is_closed(self, name: Relative, status: os.stat_result) -> bool:
        """Return whether the node is below a directory that the jail cannot read.

        Such a directory itself is in the survey, without content.
        """
        closed = name[:-1] in self._closed
        if stat.S_ISDIR(status.st_mode) and (closed or not self.readable(status)):
            self._closed.add(name)
            if not closed:
                self.leave_out(name)
        return closed


def look(tree: Tree, scope: ScanScope, bounds: Bounds) -> Manifest:
    """Return the current content of the tree.

    Only symlinks are read, unless the file system does not give each write a new ctime. Then files
    are read for digests, too.
    """
    survey = TreeScan(tree, scope, bounds)
    digests = not stamps.tells_every_write(tree.fd)
    nodes: dict[str, FileNode] = {}
    for name, status in survey:
        node: FileNode | None = None
        if stat.S_ISDIR(status.st_mode):
            node = FileNode("directory", mode_of(status), identity=identity_of(status))
        elif stat.S_ISLNK(status.st_mode):
            node = link_at(tree, name)
            if node is not None and is_item_link(node):
                continue
        elif stat.S_ISREG(status.st_mode) and survey.readable(status):
            survey.count(status.st_blocks * 512)
            node = file_node(status, digest(tree, name, survey) if digests else None)
        elif not stat.S_ISREG(status.st_mode):
            node = special_node(status)
        if node is None or node.kind == "special":
            survey.leave_out(name)
        if node is not None:
            nodes["/".join(name)] = node
    return Manifest(nodes, tuple(survey.left_out))


def node_at(tree: Tree, name: Relative) -> FileNode | None:
    """Return the current node of the name, or None if it does not exist. Raises OSError if it is
    not accessible."""
    try:
        fd = tree.hold(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with closing(fd):
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            return FileNode("directory", mode_of(status), identity=identity_of(status))
        if stat.S_ISLNK(status.st_mode):
            text = os.readlink(b"", dir_fd=fd)
            return FileNode("symlink", text=text, identity=identity_of(status))
        return file_node(status) if stat.S_ISREG(status.st_mode) else special_node(status)


def digest(tree: Tree, name: Relative, survey: TreeScan | None = None) -> bytes | None:
    """Return a SHA-256 over the blocks of a file that are not all zero, so that holes cost nothing.

    Return None if the file cannot be read. Compare the digests of files of the same size only.
    """
    try:
        with tree.open(name) as file:
            return digest_of(file.fd, file.size, survey)
    except (NotFound, InvalidPath, Denied):
        return None


def data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part with data in a file of `size` bytes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
            at = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # a hole to the end, or code inside has just made the file shorter
        if start < at:
            yield start, at


def digest_of(fd: int, size: int, survey: TreeScan | None) -> bytes:
    hasher = hashlib.sha256(str(size).encode())
    zero = bytes(_BLOCK)
    seen = -1
    for start, end in data_ranges(fd, size):
        for number in range(start // _BLOCK, -(-end // _BLOCK)):
            if number <= seen:
                continue
            if survey is not None:
                survey.check()
            seen = number
            block = os.pread(fd, min(_BLOCK, size - number * _BLOCK), number * _BLOCK)
            if block != zero[: len(block)]:
                hasher.update(b"%d:" % number)
                hasher.update(block)
    return hasher.digest()


def digest_of_bytes(content: bytes) -> bytes:
    """Return the digest that `digest_of` returns for a file with this content."""
    hasher = hashlib.sha256(str(len(content)).encode())
    zero = bytes(_BLOCK)
    for at in range(0, len(content), _BLOCK):
        block = content[at : at + _BLOCK]
        if block != zero[: len(block)]:
            hasher.update(b"%d:" % (at // _BLOCK))
            hasher.update(block)
    return hasher.digest()


def sealed(tree: Tree, change: PlannedChange, survey: TreeScan) -> PlannedChange:
    """Return the change with the digest of the current content of the new file in `tree`.

    Raises Conflict `workspace_changed` if the file was written since `tree` was listed.
    """
    after = change.after
    if after is None or after.kind != "file" or not change.content:
        return change
    try:
        with tree.open(change.relative) as file:
            sha256 = digest_of(file.fd, file.size, survey)
            inode_and_size = os.fstat(file.fd).st_ino, file.size
    except (NotFound, InvalidPath) as error:
        raise written_since(tree, change) from error
    if inode_and_size != (after.identity[0], after.size):
        raise written_since(tree, change)
    return replace(change, after=replace(after, sha256=sha256))


def written_since(tree: Tree, change: PlannedChange) -> Conflict:
    path = tree.shown(change.relative)
    return Conflict(
        f"the content of '{path}' was written again after it was recorded, so nothing was changed",
        code="workspace_changed",
        hint="run the command again, and look at its changes again",
        details={"path": path},
    )


def link_at(tree: Tree, name: Relative) -> FileNode | None:
    with translated(tree.shown(name)):
        node = node_at(tree, name)
    if node is None:
        raise NotFound("the file disappeared")
    return node if node.kind == "symlink" else None


def is_item_link(node: FileNode) -> bool:
    """Return whether a symlink stands for an item of the quarantine. Such a link belongs to one
    kernel and is not part of the files."""
    return node.text is not None and node.text.startswith(_ITEMS)


def file_node(status: os.stat_result, sha256: bytes | None = None) -> FileNode:
    return FileNode(
        "file",
        mode_of(status),
        status.st_size,
        status.st_mtime_ns,
        identity=identity_of(status),
        sha256=sha256,
        set_id=stat.S_IMODE(status.st_mode) & 0o6000,
        links=status.st_nlink,
    )


def special_node(status: os.stat_result) -> FileNode:
    return FileNode("special", mode_of(status), identity=identity_of(status))


def mode_of(status: os.stat_result) -> int:
    return stat.S_IMODE(status.st_mode) & 0o777


def identity_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_ctime_ns


def _too_large(what: str, limit: float) -> TooLarge:
    return TooLarge(
        f"the workspace {what}",
        code="workspace_too_large",
        hint="run the command itself instead, or delete files that are not needed",
        details={"limit": limit},
    )
