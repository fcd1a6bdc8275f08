"""One tree of files, open by a directory fd. Each access starts there and stays beneath it.

The code inside runs at the same time and is hostile. So this module never builds a path string of
the host. It keeps no fd of a subdirectory after a call, because a rename could move it elsewhere.
It never relies on an earlier check. Each call has a limit for bytes, entries or time.
"""

import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from sbx.linux.descriptors import OwnedDescriptor, closing
from sbx.protocol.files import FileEntry, Listing
from sbx.workspace import safe_open
from sbx.workspace.disk_usage import DiskUsage, EarlyStop, measure
from sbx.workspace.errors import is_a_directory, too_large, translated, wrong_path
from sbx.workspace.listing import entry_of, list_directory, shown
from sbx.workspace.rmtree import remove_tree
from sbx.workspace.safe_open import encoded
from sbx.workspace.streams import (
    FileWriter,
    OpenFile,
    Owner,
    ReceivedFile,
    StagedFile,
    drive,
    open_regular,
)
from sbx.workspace.walk import Walk

Relative = tuple[str, ...]


class Tree(OwnedDescriptor):
    """A tree of files. It owns the directory fd `fd` (O_PATH suffices) until `close`.

    `view` is the path at which the code inside sees this tree. New files and directories get the
    owner `owner`, the uid and gid of the jail on the host; without it they belong to the caller.
    Files are first written in the directory fd `staging`, which the tree borrows. It is outside of
    every view, on the same file system. Without it, files are written under a temporary name next
    to the target.
    """

    def __init__(
        self,
        fd: int,
        *,
        view: str,
        owner: Owner | None = None,
        staging: int | None = None,
        opener: safe_open.Opener | None = None,
    ) -> None:
        super().__init__(fd)
        self.view = view
        self.owner = owner
        self.staging = staging
        self.durable = True  # sync each written file to the disk before it gets its name
        self.opener = opener or safe_open.opener()

    @classmethod
    def at(
        cls, directory: Path, *, view: str, owner: Owner | None = None, staging: int | None = None
    ) -> Self:
        """Open the tree at `directory`, which must not be a symlink."""
        with translated(view):
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        return cls(fd, view=view, owner=owner, staging=staging)

    def open(self, relative: Relative) -> OpenFile:
        """Open a regular file for streaming. The caller closes it.

        Raises NotFound, or InvalidPath with the reason `symlink`, `hardlink` (to another owner's
        file), `not_a_file`, `is_a_directory`, `not_a_directory` or `mount_point`.
        """
        uid = os.geteuid() if self.owner is None else self.owner[0]
        return open_regular(
            self.opener, self.fd, relative, shown=self.shown(relative), owner_uid=uid
        )

    def read(self, relative: Relative, *, max_bytes: int) -> bytes:
        """Return the content of a regular file. Raises the errors of `open`, and TooLarge."""
        with self.open(relative) as file:
            if file.size > max_bytes:
                raise too_large(self.shown(relative), max_bytes)
            with translated(self.shown(relative)):
                return b"".join(file.chunks())

    def write(
        self,
        relative: Relative,
        data: bytes | Iterable[bytes],
        *,
        max_bytes: int,
        mode: int | None = None,
        new: bool = False,
    ) -> int:
        """Write the file, create its missing parent directories, and return its size in bytes.

        The file changes in one step: a reader sees the old or the new content. A symlink of that
        name is replaced, not followed. After a failure, an existing file is unchanged. Without a
        `mode`, the file keeps its permissions, or gets 0644. It never gets a set-id bit. With
        `new`, the name must not exist. Raises TooLarge, InvalidPath, Denied, Conflict
        `file_exists`, and Unavailable `no_space`.
        """
        return drive(
            self.writing(relative, max_bytes=max_bytes, mode=mode, new=new),
            (data,) if isinstance(data, bytes) else data,
        )

    def writing(
        self,
        relative: Relative,
        *,
        max_bytes: int,
        mode: int | None = None,
        new: bool = False,
        received: ReceivedFile | None = None,
    ) -> FileWriter[int]:
        """Write a file chunk by chunk, like `write`; see `FileWriter`. `received` must be in the
        directory `staging`; the file begins with its content, without a copy."""
        path = self.shown(relative)
        if not relative:
            raise is_a_directory(path)
        with translated(path):
            parent = self.parent(relative[:-1])
        with closing(parent):
            with translated(path):
                if mode is None:
                    mode = _kept_mode(parent, encoded(relative[-1]))
                staging = parent if self.staging is None else self.staging
                staged = StagedFile(staging, received=received)
            with staged:
                if staged.size > max_bytes:
                    raise too_large(path, max_bytes)
                while (chunk := (yield)) is not None:
                    if staged.size + len(chunk) > max_bytes:
                        raise too_large(path, max_bytes)
                    with translated(path):
                        staged.write(chunk)
                with translated(path):
                    name = encoded(relative[-1])
                    staged.commit(
                        parent, name, mode=mode, owner=self.owner, new=new, sync=self.durable
                    )
                return staged.size

    def stat(self, relative: Relative) -> FileEntry:
        """Return the entry; for a symlink, the link itself. Raises NotFound, InvalidPath."""
        with (
            translated(self.shown(relative)),
            closing(self.opener(self.fd, relative, os.O_PATH | os.O_NOFOLLOW)) as fd,
        ):
            return entry_of(self.shown(relative), os.fstat(fd))

    def list(
        self, relative: Relative = (), *, max_entries: int = 10_000, max_depth: int = 1
    ) -> Listing:
        """Return at most `max_entries` entries of a directory, down to `max_depth` levels.

        The order is breadth first, so that an incomplete listing has the upper levels. Raises
        NotFound and InvalidPath for `relative` itself. A subdirectory that cannot be read makes the
        listing incomplete.
        """
        return list_directory(
            self.opener,
            self.fd,
            relative,
            view=self.view,
            max_entries=max_entries,
            max_depth=max_depth,
        )

    def walk(
        self, walk: Walk, relative: Relative = ()
    ) -> Iterator[tuple[Relative, os.stat_result]]:
        """Yield everything below a directory within the limits of `walk`. Raises as `list`."""
        return walk.below(self.opener, self.fd, relative, view=self.view)

    def hold(self, relative: Relative) -> int:
        """Return an O_PATH fd of the path; of a symlink, the link itself. The caller closes it.

        Raises OSError.
        """
        return self.opener(self.fd, relative, os.O_PATH | os.O_NOFOLLOW)

    def make_directory(self, relative: Relative) -> None:
        """Create a directory and its missing parents. An existing directory stays unchanged."""
        with translated(self.shown(relative)):
            os.close(self.parent(relative))

    def delete(self, relative: Relative, *, deadline_s: float = 30.0) -> bool:
        """Delete a file, a symlink (never its target) or a whole directory.

        The name is gone when this returns. Return False if the deadline passed before everything
        below it was removed. Raises NotFound, InvalidPath, and Denied if the name could not be
        removed.
        """
        path = self.shown(relative)
        if not relative:
            raise wrong_path(path, "reserved", "is the root of the workspace")
        name = encoded(relative[-1])
        with (
            translated(path),
            closing(self.opener(self.fd, relative[:-1], os.O_PATH | os.O_DIRECTORY)) as parent,
        ):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=parent)
                return True
            if remove_tree(parent, os.fsdecode(name), deadline_s, trash=self.staging):
                return True
            if _exists(parent, name):
                os.rmdir(name, dir_fd=parent)  # raises the reason why it could not be moved
                return True
            return False

    def measure(
        self,
        *,
        max_entries: int = 1_000_000,
        deadline_s: float = 5.0,
        enough: EarlyStop | None = None,
        since: float = -math.inf,
    ) -> DiskUsage:
        """Return the disk usage of the tree, or of its entries that changed since a time; see
        `DiskUsage` for incomplete results."""
        return measure(
            self.opener,
            self.fd,
            max_entries=max_entries,
            deadline_s=deadline_s,
            enough=enough,
            since=since,
        )

    def shown(self, relative: Relative) -> str:
        """Return the path as the code inside sees it, in valid UTF-8 for messages."""
        return shown(self.view, relative)

    def parent(self, relative: Relative) -> int:
        """Open or create the directory `relative`. Resolve each step from the root again."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return self.opener(self.fd, relative, flags)
        except FileNotFoundError:
            # From below: a copy of a tree of depth 1500, from the top, took minutes.
            for depth in range(_existing(self, relative), len(relative)):
                self._create_directory(relative[:depth], encoded(relative[depth]))
            return self.opener(self.fd, relative, flags)

    def _create_directory(self, above: Relative, name: bytes) -> None:
        parent = self.opener(self.fd, above, os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
            if self.owner is not None:
                with closing(
                    os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
                ) as fd:
                    # If the code inside replaced it, the directory has the owner already.
                    if os.fstat(fd).st_uid == os.geteuid():
                        os.fchown(fd, *self.owner)
        except FileExistsError:
            return
        finally:
            os.close(parent)


def _existing(tree: Tree, relative: Relative) -> int:
    """Return how many parts lead to the deepest directory above a missing path."""
    for depth in range(len(relative) - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.close(tree.hold(relative[:depth]))
            return depth
    return 0


def _kept_mode(parent: int, name: bytes) -> int:
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    return stat.S_IMODE(status.st_mode) & 0o777 if stat.S_ISREG(status.st_mode) else 0o644


def _exists(parent: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
