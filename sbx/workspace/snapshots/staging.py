"""The stage of a commit: a directory that only sbx uses, with operations between it and the tree.

Each step looks up each name beneath the fd of the tree again, without following a symlink or
crossing a mount: the code inside may replace the names at any time.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sbx.errors import Denied
from sbx.linux.descriptors import closing
from sbx.linux.renameat2 import rename_new
from sbx.workspace.safe_open import encoded
from sbx.workspace.snapshots.manifest import FileNode, PlannedChange
from sbx.workspace.tree import Tree

# Errors of Linux that mean that another process changed the path.
NOT_AS_IT_WAS = frozenset(
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


class Stage:
    """The stage of the tree `target`: `fd` is a directory on the same mount.

    All methods raise OSError, and Denied `file_not_permitted` for a node that does not belong to
    the code inside.
    """

    def __init__(self, target: Tree, fd: int) -> None:
        self.target = target
        self.fd = fd

    @contextmanager
    def above(self, change: PlannedChange) -> Iterator[tuple[int, bytes]]:
        """Open the parent directory of the change; yield its fd and the name in it."""
        name = change.relative
        with closing(
            self.target.opener(self.target.fd, name[:-1], os.O_RDONLY | os.O_DIRECTORY)
        ) as parent:
            self._demand_own(parent, change)
            yield parent, encoded(name[-1])

    @contextmanager
    def open_target(self, change: PlannedChange) -> Iterator[int]:
        """Open the node of the change itself. A symlink of that name is refused."""
        flags = os.O_PATH | (os.O_DIRECTORY if change.node.kind == "directory" else 0)
        with closing(self.target.opener(self.target.fd, change.relative, flags)) as fd:
            self._demand_own(fd, change)
            yield fd

    def staged(self, name: bytes) -> os.stat_result | None:
        """Return the status of a name in the stage, or None."""
        return status_of(self.fd, name)

    def make_directory(self, name: bytes) -> int:
        """Create or open a directory in the stage, set its owner, and return its inode."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.fd)
        if self.target.owner is not None:
            os.chown(name, *self.target.owner, dir_fd=self.fd, follow_symlinks=False)
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_ino

    def put(self, name: bytes, change: PlannedChange) -> None:
        """Move a node from the stage to its path in the tree, which must not exist."""
        with self.above(change) as (parent, last):
            rename_new(self.fd, name, parent, last)

    def take(self, change: PlannedChange, name: bytes) -> None:
        """Move a node from its path in the tree into the stage, under this name."""
        with self.above(change) as (parent, last):
            os.rename(last, name, src_dir_fd=parent, dst_dir_fd=self.fd)

    def chmod(self, change: PlannedChange, mode: int, *, keep: int = 0) -> None:
        """Set a mode. The bits in `keep` stay as they are."""
        with self.open_target(change) as fd:
            before = os.fstat(fd).st_mode & 0o777
            if (mode | before & keep) != before:
                os.chmod(f"/proc/self/fd/{fd}", mode | before & keep)

    def _demand_own(self, fd: int, change: PlannedChange) -> None:
        """Refuse nodes of other users if this process has more rights than the jail."""
        owner = self.target.owner
        if owner is not None and os.fstat(fd).st_uid != owner[0]:
            raise Denied(
                f"'{self.target.shown(change.relative)}' or its directory belongs to another user",
                code="file_not_permitted",
                hint="only files of the sandbox can be changed",
            )


def stamp(fd: int, like: FileNode) -> None:
    """Set mode and time of the open node `fd` (O_PATH suffices). Raises OSError."""
    place = f"/proc/self/fd/{fd}"
    os.chmod(place, like.mode)
    os.utime(place, ns=(like.mtime_ns, like.mtime_ns))


def status_of(parent: int, name: bytes) -> os.stat_result | None:
    """Return the status of a name in the directory fd `parent`, or None. Raises OSError.

    Do not follow a symlink.
    """
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
