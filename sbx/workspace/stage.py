"""Where a commit is at work: the tree that changes, and a directory beside it that only we use.

Every name is looked up beneath the tree's fd at each step anew, through no symlink and no mount:
the code inside swaps them meanwhile.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sbx.errors import Denied
from sbx.linux.renameat2 import rename_new
from sbx.workspace.beneath import encoded
from sbx.workspace.changes import Change, Node
from sbx.workspace.tree import Tree

# What linux says where somebody was quicker.
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
    """`fd` is a directory on the mount of the tree `target`. All methods raise OSError, and Denied
    `file_not_permitted` where something belongs to somebody else than the code inside."""

    def __init__(self, target: Tree, fd: int) -> None:
        self.target = target
        self.fd = fd

    @contextmanager
    def above(self, change: Change) -> Iterator[tuple[int, bytes]]:
        """The directory that has the name, and the name in it."""
        name = change.relative
        parent = self.target.opener(self.target.fd, name[:-1], os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._demand_own(parent, change)
            yield parent, encoded(name[-1])
        finally:
            os.close(parent)

    @contextmanager
    def held(self, change: Change) -> Iterator[int]:
        """It itself, and no symlink of that name."""
        flags = os.O_PATH | (os.O_DIRECTORY if change.node.kind == "directory" else 0)
        fd = self.target.opener(self.target.fd, change.relative, flags)
        try:
            self._demand_own(fd, change)
            yield fd
        finally:
            os.close(fd)

    def staged(self, name: bytes) -> os.stat_result | None:
        """What has this name in the stage."""
        return found(self.fd, name)

    def make_directory(self, name: bytes) -> int:
        """Make or find it in the stage, give it away, and give its inode."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.fd)
        if self.target.owner is not None:
            os.chown(name, *self.target.owner, dir_fd=self.fd, follow_symlinks=False)
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_ino

    def put(self, name: bytes, change: Change) -> None:
        """Give what has this name in the stage its place, where nothing is."""
        with self.above(change) as (parent, last):
            rename_new(self.fd, name, parent, last)

    def take(self, change: Change, name: bytes) -> None:
        """Put what is there into the stage, under this name."""
        with self.above(change) as (parent, last):
            os.rename(last, name, src_dir_fd=parent, dst_dir_fd=self.fd)

    def chmod(self, change: Change, mode: int, *, keep: int = 0) -> None:
        """`keep`: those bits of the mode that it has stay."""
        with self.held(change) as fd:
            before = os.fstat(fd).st_mode & 0o777
            if (mode | before & keep) != before:
                os.chmod(f"/proc/self/fd/{fd}", mode | before & keep)

    def _demand_own(self, fd: int, change: Change) -> None:
        """Where the host has more rights than the jail, it does not lend them."""
        owner = self.target.owner
        if owner is not None and os.fstat(fd).st_uid != owner[0]:
            raise Denied(
                f"'{self.target.shown(change.relative)}' or its directory belongs to another user",
                code="file_not_permitted",
                hint="only files of the sandbox's own can be changed",
            )


def stamp(fd: int, like: Node) -> None:
    """Mode and time of what `fd` (O_PATH will do) holds. Raises OSError."""
    place = f"/proc/self/fd/{fd}"
    os.chmod(place, like.mode)
    os.utime(place, ns=(like.mtime_ns, like.mtime_ns))


def found(parent: int, name: bytes) -> os.stat_result | None:
    """What has the name in the directory fd `parent`, a symlink itself. Raises OSError."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
