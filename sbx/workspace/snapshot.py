"""What a tree holds at one moment, looked at in bounds, whatever was built there."""

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
from sbx.workspace.changes import Change, Manifest, Node
from sbx.workspace.refusals import translated
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

_ITEMS = f"{ITEMS}/".encode()

ENTRIES_MAX = 100_000
DEADLINE_S = 30.0
_NAMES_MAX = 32 << 20  # bytes of all paths together: a deep tree makes long ones
_PATH_MAX = 4000  # bytes; openat2(2) takes no more than 4095
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Scope:
    """Which part of a tree is meant. `reserved` names are of the workspace itself and stay as they
    are; below `mounted` ones the code inside sees another tree."""

    reserved: tuple[Relative, ...] = ()
    mounted: tuple[Relative, ...] = ()

    def has(self, name: Relative) -> bool:
        return name not in self.reserved and not any(
            len(name) > len(top) and name[: len(top)] == top for top in self.mounted
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large a tree may be, in allocated bytes and in names, and how long a pass over it may
    take. Whoever sets `stopped` does not want it any more."""

    bytes_max: int
    entries_max: int = ENTRIES_MAX
    deadline_s: float = DEADLINE_S
    stopped: threading.Event = field(default_factory=threading.Event)


class Survey:
    """One pass over a tree. Raises TooLarge `workspace_too_large`, and Closed when stopped."""

    def __init__(self, tree: Tree, scope: Scope, bounds: Bounds) -> None:
        self._tree = tree
        self._scope = scope
        self._bounds = bounds
        self._walk = Walk(max_entries=bounds.entries_max, deadline_s=bounds.deadline_s)
        self._closed: set[Relative] = set()
        self._bytes = 0
        self._names = 0
        self.left_out: list[str] = []

    def __iter__(self) -> Iterator[tuple[Relative, os.stat_result]]:
        for name, found in self._tree.walk(self._walk):
            self.check()
            if not self._scope.has(name) or self._is_closed(name, found):
                continue
            size = len("/".join(name).encode("utf-8", "surrogateescape"))
            self._names += size
            if size > _PATH_MAX or self._names > _NAMES_MAX:
                raise _too_large(f"has paths of more than {_PATH_MAX} bytes, or too many", size)
            yield name, found
        self.check()
        if self._walk.exhausted:
            most = self._bounds.entries_max
            raise _too_large(f"has more than {most} files and directories", most)

    def check(self) -> None:
        if self._bounds.stopped.is_set():
            raise Closed("nobody waits for this copy any more")
        if not self._walk.in_time:
            most = self._bounds.deadline_s
            raise _too_large(f"takes longer than {most:g} s to copy or to compare", most)

    def count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._bounds.bytes_max:
            most = self._bounds.bytes_max
            raise _too_large(f"has more than {most} bytes", most)

    def leave_out(self, name: Relative) -> None:
        self.left_out.append("/".join(name))

    def readable(self, found: os.stat_result) -> bool:
        """Whether we can read it, and where we have more rights than the jail, whether it could."""
        wanted = 0o5 if stat.S_ISDIR(found.st_mode) else 0o4
        owner = self._tree.owner
        if owner is None:
            if (uid := os.geteuid()) == 0:
                return True
            ours = found.st_gid in (os.getegid(), *os.getgroups())
            shift = 6 if found.st_uid == uid else 3 if ours else 0
        elif found.st_uid == owner[0]:
            return True
        else:
            shift = 3 if found.st_gid == owner[1] else 0
        return found.st_mode >> shift & wanted == wanted

    def _is_closed(self, name: Relative, found: os.stat_result) -> bool:
        """Whether it lies below a directory that the jail cannot look into; such a one itself is
        there, and empty."""
        closed = name[:-1] in self._closed
        if stat.S_ISDIR(found.st_mode) and (closed or not self.readable(found)):
            self._closed.add(name)
            if not closed:
                self.leave_out(name)
        return closed


def look(tree: Tree, scope: Scope, bounds: Bounds) -> Manifest:
    """What the tree holds now. Nothing is read but symlinks, unless the file system does not tell
    every write."""
    survey = Survey(tree, scope, bounds)
    digests = not stamps.tells_every_write(tree.fd)
    nodes: dict[str, Node] = {}
    for name, found in survey:
        node: Node | None = None
        if stat.S_ISDIR(found.st_mode):
            node = Node("directory", mode_of(found), identity=identity_of(found))
        elif stat.S_ISLNK(found.st_mode):
            node = link_at(tree, name)
            if node is not None and is_item_link(node):
                continue
        elif stat.S_ISREG(found.st_mode) and survey.readable(found):
            survey.count(found.st_blocks * 512)
            node = file_node(found, digest(tree, name, survey) if digests else None)
        elif not stat.S_ISREG(found.st_mode):
            node = special_node(found)
        if node is None or node.kind == "special":
            survey.leave_out(name)
        if node is not None:
            nodes["/".join(name)] = node
    return Manifest(nodes, tuple(survey.left_out))


def node_at(tree: Tree, name: Relative) -> Node | None:
    """What the name stands for now, None for nothing. Raises OSError where it cannot be
    reached."""
    try:
        fd = tree.hold(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            return Node("directory", mode_of(found), identity=identity_of(found))
        if stat.S_ISLNK(found.st_mode):
            text = os.readlink(b"", dir_fd=fd)
            return Node("symlink", text=text, identity=identity_of(found))
        return file_node(found) if stat.S_ISREG(found.st_mode) else special_node(found)
    finally:
        os.close(fd)


def digest(tree: Tree, name: Relative, survey: Survey | None = None) -> bytes | None:
    """SHA-256 over the blocks of a file that are not all zero, so that holes cost nothing; None
    where it cannot be read. To be compared among files of one size."""
    try:
        with tree.open(name) as file:
            return digest_of(file.fd, file.size, survey)
    except (NotFound, InvalidPath, Denied):
        return None


def extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file of `size` bytes has something written."""
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


def digest_of(fd: int, size: int, survey: Survey | None) -> bytes:
    told = hashlib.sha256(str(size).encode())
    zero = bytes(_BLOCK)
    seen = -1
    for start, end in extents(fd, size):
        for number in range(start // _BLOCK, -(-end // _BLOCK)):
            if number <= seen:
                continue
            if survey is not None:
                survey.check()
            seen = number
            block = os.pread(fd, min(_BLOCK, size - number * _BLOCK), number * _BLOCK)
            if block != zero[: len(block)]:
                told.update(b"%d:" % number)
                told.update(block)
    return told.digest()


def digest_of_bytes(content: bytes) -> bytes:
    """Return the digest that `digest_of` gives for a file with this content."""
    told = hashlib.sha256(str(len(content)).encode())
    zero = bytes(_BLOCK)
    for at in range(0, len(content), _BLOCK):
        block = content[at : at + _BLOCK]
        if block != zero[: len(block)]:
            told.update(b"%d:" % (at // _BLOCK))
            told.update(block)
    return told.digest()


def sealed(tree: Tree, change: Change, survey: Survey) -> Change:
    """Return the change with the digest of the content that the new file has in `tree` now.

    Raises Conflict `workspace_changed` when the file was written since `tree` was listed.
    """
    after = change.after
    if after is None or after.kind != "file" or not change.content:
        return change
    try:
        with tree.open(change.relative) as file:
            sha256 = digest_of(file.fd, file.size, survey)
            found = os.fstat(file.fd).st_ino, file.size
    except (NotFound, InvalidPath) as error:
        raise written_since(tree, change) from error
    if found != (after.identity[0], after.size):
        raise written_since(tree, change)
    return replace(change, after=replace(after, sha256=sha256))


def written_since(tree: Tree, change: Change) -> Conflict:
    path = tree.shown(change.relative)
    return Conflict(
        f"the content of '{path}' was written again after it was recorded, so nothing was changed",
        code="workspace_changed",
        hint="run the command again, and look at its changes again",
        details={"path": path},
    )


def link_at(tree: Tree, name: Relative) -> Node | None:
    with translated(tree.shown(name)):
        found = node_at(tree, name)
    if found is None:
        raise NotFound("it vanished")
    return found if found.kind == "symlink" else None


def is_item_link(node: Node) -> bool:
    """Return whether a symlink stands for an item of the quarantine: it belongs to one kernel, and
    is no part of the files."""
    return node.text is not None and node.text.startswith(_ITEMS)


def file_node(found: os.stat_result, sha256: bytes | None = None) -> Node:
    return Node(
        "file",
        mode_of(found),
        found.st_size,
        found.st_mtime_ns,
        identity=identity_of(found),
        sha256=sha256,
        set_id=stat.S_IMODE(found.st_mode) & 0o6000,
        links=found.st_nlink,
    )


def special_node(found: os.stat_result) -> Node:
    return Node("special", mode_of(found), identity=identity_of(found))


def mode_of(found: os.stat_result) -> int:
    return stat.S_IMODE(found.st_mode) & 0o777


def identity_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_ctime_ns


def _too_large(what: str, limit: float) -> TooLarge:
    return TooLarge(
        f"the workspace {what}",
        code="workspace_too_large",
        hint="run the command itself instead, or delete what is not needed",
        details={"limit": limit},
    )
