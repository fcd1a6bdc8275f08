"""One tree of files, held by a directory fd; every access starts there and stays beneath it.

The code inside runs at the same time and against us. So no path string of the host is ever built,
no fd of a subdirectory outlives a call (a rename could move it elsewhere), nothing is trusted
because it was looked at before, and each call is bounded in bytes, entries or time.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from sbx.protocol.files import Entry, Listing
from sbx.workspace import beneath
from sbx.workspace.beneath import encoded
from sbx.workspace.listing import entry_of, list_directory, shown
from sbx.workspace.measure import Enough, Usage, measure
from sbx.workspace.refusals import is_a_directory, too_large, translated, wrong_path
from sbx.workspace.removal import remove_tree
from sbx.workspace.streams import Intake, OpenFile, Owner, StagedFile, drive, open_regular
from sbx.workspace.walk import Walk

Relative = tuple[str, ...]


class Tree:
    """Owns the directory fd `fd` (O_PATH will do) and closes it on `close`.

    `view` is where the code inside sees this tree. New files and directories are given to `owner`,
    the jail's uid and gid on the host; without one they are the caller's. Files are written first
    in the directory fd `staging`, which is only borrowed: it lies outside of every view, on the
    same file system; without one, under a temporary name beside the file.
    """

    def __init__(
        self,
        fd: int,
        *,
        view: str,
        owner: Owner | None = None,
        staging: int | None = None,
        opener: beneath.Opener | None = None,
    ) -> None:
        self.fd = fd
        self.view = view
        self.owner = owner
        self.staging = staging
        self.durable = True  # each file written is synced to the disk before it has its name
        self.opener = opener or beneath.opener()

    @classmethod
    def at(
        cls, directory: Path, *, view: str, owner: Owner | None = None, staging: int | None = None
    ) -> Self:
        """Hold the tree at `directory`, which must not be a symlink."""
        with translated(view):
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        return cls(fd, view=view, owner=owner, staging=staging)

    def open(self, relative: Relative) -> OpenFile:
        """Open a regular file to be streamed; the caller closes it.

        Raises NotFound, or InvalidPath with the reason `symlink`, `hardlink` (to another owner's
        file), `not_a_file`, `is_a_directory`, `not_a_directory` or `mount_point`.
        """
        uid = os.geteuid() if self.owner is None else self.owner[0]
        return open_regular(
            self.opener, self.fd, relative, shown=self.shown(relative), owner_uid=uid
        )

    def read(self, relative: Relative, *, max_bytes: int) -> bytes:
        """All bytes of a regular file. Raises as `open`, and TooLarge beyond `max_bytes`."""
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
        """Make the file, and the directories it needs, and give its size in bytes.

        One step: a reader sees the old content or all of the new. A symlink of that name is
        replaced, not followed; after any failure what was there is untouched. Without a `mode` the
        file keeps the permissions it has, or gets 0644; it never gets a set-id bit. `new`: nothing
        of that name may be there.
        Raises TooLarge, InvalidPath, Denied, Conflict `file_exists`, and Unavailable `no_space`.
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
    ) -> Intake[int]:
        """`write`, a chunk at a time; see `Intake`."""
        path = self.shown(relative)
        if not relative:
            raise is_a_directory(path)
        with translated(path):
            parent = self.parent(relative[:-1])
        try:
            with translated(path):
                if mode is None:
                    mode = _kept_mode(parent, encoded(relative[-1]))
                staged = StagedFile(parent if self.staging is None else self.staging)
            with staged:
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
        finally:
            os.close(parent)

    def stat(self, relative: Relative) -> Entry:
        """What the name stands for; of a symlink the link itself. Raises NotFound, InvalidPath."""
        with translated(self.shown(relative)):
            fd = self.opener(self.fd, relative, os.O_PATH | os.O_NOFOLLOW)
            try:
                return entry_of(self.shown(relative), os.fstat(fd))
            finally:
                os.close(fd)

    def list(
        self, relative: Relative = (), *, max_entries: int = 10_000, max_depth: int = 1
    ) -> Listing:
        """What lies in a directory, down to `max_depth` levels, at most `max_entries` of it.

        Breadth first, so that a cut listing has what is near. Raises NotFound and InvalidPath for
        `relative` itself; a subdirectory that cannot be read makes the listing not `complete`.
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
        """All below a directory, as far as `walk` goes. Raises as `list`."""
        return walk.below(self.opener, self.fd, relative, view=self.view)

    def hold(self, relative: Relative) -> int:
        """An O_PATH fd of what the name stands for, a symlink itself; the caller closes it.

        Raises OSError.
        """
        return self.opener(self.fd, relative, os.O_PATH | os.O_NOFOLLOW)

    def make_directory(self, relative: Relative) -> None:
        """Make a directory and those it needs; one that is there is left as it is."""
        with translated(self.shown(relative)):
            os.close(self.parent(relative))

    def delete(self, relative: Relative, *, deadline_s: float = 30.0) -> bool:
        """Delete a file, a symlink (never what it leads to) or a whole directory.

        The name is gone when this returns. False when the time was up before all below it was
        removed. Raises NotFound, InvalidPath, and Denied where the name could not be taken away.
        """
        path = self.shown(relative)
        if not relative:
            raise wrong_path(path, "reserved", "is the root of the workspace")
        name = encoded(relative[-1])
        with translated(path):
            parent = self.opener(self.fd, relative[:-1], os.O_PATH | os.O_DIRECTORY)
            try:
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode):
                    os.unlink(name, dir_fd=parent)
                    return True
                if remove_tree(parent, os.fsdecode(name), deadline_s, trash=self.staging):
                    return True
                if _exists(parent, name):
                    os.rmdir(name, dir_fd=parent)  # for the reason why it could not be moved
                    return True
                return False
            finally:
                os.close(parent)

    def measure(
        self,
        *,
        max_entries: int = 1_000_000,
        deadline_s: float = 5.0,
        enough: Enough | None = None,
    ) -> Usage:
        """What the tree takes on disk; see `Usage` for what not `complete` means."""
        return measure(
            self.opener,
            self.fd,
            max_entries=max_entries,
            deadline_s=deadline_s,
            enough=enough,
        )

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shown(self, relative: Relative) -> str:
        """The path as the code inside sees it, fit for a message."""
        return shown(self.view, relative)

    def parent(self, relative: Relative) -> int:
        """Open the directory `relative`, made if need be, each step from the root anew."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return self.opener(self.fd, relative, flags)
        except FileNotFoundError:
            for depth, name in enumerate(relative):
                self._make_one(relative[:depth], encoded(name))
            return self.opener(self.fd, relative, flags)

    def _make_one(self, above: Relative, name: bytes) -> None:
        parent = self.opener(self.fd, above, os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
            if self.owner is not None:
                made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
                try:
                    # Swapped by the code inside, it is a directory that the owner has already.
                    if os.fstat(made).st_uid == os.geteuid():
                        os.fchown(made, *self.owner)
                finally:
                    os.close(made)
        except FileExistsError:
            return
        finally:
            os.close(parent)


def _kept_mode(parent: int, name: bytes) -> int:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    return stat.S_IMODE(found.st_mode) & 0o777 if stat.S_ISREG(found.st_mode) else 0o644


def _exists(parent: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
