"""The files of a conversation as callers name them: one path rule in front of up to three trees."""

from collections.abc import Iterable

from sbx.protocol.files import Entry, Listing
from sbx.workspace import paths
from sbx.workspace.paths import Location, Part
from sbx.workspace.streams import Intake, OpenFile
from sbx.workspace.tree import Relative, Tree

DEFAULT_MAX_BYTES = 512 * 1024 * 1024


class Files:
    """Routes each call to the tree its path means; borrows the trees and closes none of them.

    `shared` is None where the policy does not share: `/workspace/shared` is then a directory like
    any other, only reserved. `uploads_apart` where a host directory is the workspace. All methods
    raise InvalidPath, and NotFound `file_not_found`; see `Tree` for what else.
    """

    def __init__(
        self,
        files: Tree,
        uploads: Tree | None,
        shared: Tree | None = None,
        *,
        uploads_apart: bool = False,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._files = files
        self._uploads = uploads
        self._shared = shared
        self._apart = uploads_apart
        self._max_bytes = max_bytes

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """All bytes of a file. Raises TooLarge beyond `max_bytes`."""
        tree, relative = self._at(path)
        return tree.read(relative, max_bytes=self._limit(max_bytes))

    def open(self, path: str) -> OpenFile:
        """Open a file to be streamed; the caller closes it."""
        tree, relative = self._at(path)
        return tree.open(relative)

    def write(
        self,
        path: str,
        data: bytes | Iterable[bytes],
        *,
        max_bytes: int | None = None,
        mode: int | None = None,
    ) -> int:
        """Write a file in one step, with the directories it needs, and give its size in bytes."""
        tree, relative = self._at(path, changing=True)
        return tree.write(relative, data, max_bytes=self._limit(max_bytes), mode=mode)

    def writing(self, path: str, *, max_bytes: int | None = None) -> Intake[int]:
        """`write`, a chunk at a time; see `Intake`."""
        tree, relative = self._at(path, changing=True)
        return tree.writing(relative, max_bytes=self._limit(max_bytes))

    def stat(self, path: str) -> Entry:
        """What the path stands for; of a symlink the link itself."""
        tree, relative = self._at(path)
        return tree.stat(relative)

    def list(self, path: str = ".", *, max_entries: int = 10_000, max_depth: int = 1) -> Listing:
        """What lies in a directory and down to `max_depth` levels below; see `Listing`.

        The uploads, a mount of their own inside, are listed where the code inside sees them.
        """
        tree, relative = self._at(path)
        listing = tree.list(relative, max_entries=max_entries, max_depth=max_depth)
        for mounted in (self._uploads, self._shared):
            above = f"{tree.shown(relative)}/"
            if mounted is None or mounted is tree or not mounted.view.startswith(above):
                continue
            depth = max_depth - mounted.view.removeprefix(above).count("/") - 1
            if depth > 0:
                room = max(0, max_entries - len(listing))
                more = mounted.list(max_entries=room, max_depth=depth)
                listing.complete &= more.complete
                listing.extend(more)
        listing.sort(key=lambda entry: entry.path)
        return listing

    def make_directory(self, path: str) -> None:
        """Make a directory and those it needs; one that is there is left as it is."""
        tree, relative = self._at(path, changing=True)
        tree.make_directory(relative)

    def delete(self, path: str, *, deadline_s: float = 30.0) -> bool:
        """Delete a file, a symlink itself, or a directory with all below it.

        False when the time was up before all was removed; it is out of reach in any case.
        """
        tree, relative = self._at(path, changing=True)
        return tree.delete(relative, deadline_s=deadline_s)

    def _at(self, path: str, *, changing: bool = False) -> tuple[Tree, Relative]:
        where = paths.resolve(path, changing=changing, uploads_apart=self._apart)
        match where:
            case Location(Part.UPLOADS, relative) if self._uploads is not None:
                return self._uploads, relative
            case Location(Part.UPLOADS, relative):
                return self._files, ("uploads", "temparea", *relative)
            case Location(Part.SHARED, relative) if self._shared is not None:
                return self._shared, relative
            case Location(Part.SHARED, relative):
                return self._files, ("shared", *relative)
        return self._files, where.relative

    def _limit(self, max_bytes: int | None) -> int:
        return self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
