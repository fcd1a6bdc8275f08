"""The files of a conversation by the paths of callers: one path rule for up to three trees."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sbx.errors import SbxError, TooLarge
from sbx.protocol.files import Copied, FileEntry, Kind, Listing, Matches
from sbx.workspace import paths
from sbx.workspace.copy import copy
from sbx.workspace.disk_usage import FreeRoom
from sbx.workspace.edit import check_mode, chmod, replace
from sbx.workspace.errors import workspace_full
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.move import move
from sbx.workspace.paths import Location, WorkspaceArea
from sbx.workspace.patterns import Expression, Glob
from sbx.workspace.search import Grep, Places, find
from sbx.workspace.streams import FileWriter, OpenFile, ReceivedFile, drive
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

DEFAULT_MAX_BYTES = 512 * 1024 * 1024
RESULTS_MAX = 10_000
_COPY_MAX = 4 * DEFAULT_MAX_BYTES


class Files:
    """Route each call to the tree of its path. Borrow the trees; do not close them.

    Without `shared`, the policy does not share files: `/workspace/shared` is then an ordinary
    directory with a reserved name. `uploads_apart` is set if a host directory is the workspace.
    `total_max_bytes` limits the size of one tree; None means that sbx does not limit it. `host` is
    the host directory of `files` if it refuses changes of host executables. All methods raise
    InvalidPath and NotFound `file_not_found`; see `Tree` for further errors.
    """

    def __init__(
        self,
        files: Tree,
        uploads: Tree | None,
        shared: Tree | None = None,
        *,
        uploads_apart: bool = False,
        max_bytes: int = DEFAULT_MAX_BYTES,
        total_max_bytes: int | None = None,
        host: HostDirectory | None = None,
    ) -> None:
        self._files = files
        self._host = host
        self._uploads = uploads
        self._shared = shared
        self._apart = uploads_apart
        self._max_bytes = max_bytes
        self._total_max_bytes = total_max_bytes
        self._rooms: dict[Tree, FreeRoom] = {}
        if total_max_bytes is not None:
            trees = [files] if shared is None else [files, shared]
            self._rooms = {tree: FreeRoom(tree.measure, total_max_bytes) for tree in trees}

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return the content of a file. Raises TooLarge beyond `max_bytes`."""
        tree, relative = self._at(path)
        return tree.read(relative, max_bytes=self._limit(max_bytes))

    def open(self, path: str) -> OpenFile:
        """Open a file for streaming. The caller closes it."""
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
        """Write a file in one step, with its missing directories, and return its size in bytes."""
        place = self._at(path, changing=True)
        chunks = (data,) if isinstance(data, bytes) else data
        expected = len(data) if isinstance(data, bytes) else 0
        return drive(self._writing(*place, self._limit(max_bytes), mode, expected), chunks)

    def place(self, path: str, received: ReceivedFile) -> int:
        """Move a received file to `path`, and return its size in bytes. Raise as `write`."""
        tree, relative = self._at(path, changing=True)
        if tree.staging != received.staging:
            return self.write(path, received.chunks())
        return drive(self._writing(tree, relative, self._limit(None), received=received), ())

    def writing(self, path: str, *, max_bytes: int | None = None) -> FileWriter[int]:
        """Write a file chunk by chunk, like `write`; see `FileWriter`."""
        return self._writing(*self._at(path, changing=True), self._limit(max_bytes))

    def _writing(
        self,
        tree: Tree,
        relative: Relative,
        max_bytes: int,
        mode: int | None = None,
        expected: int = 0,
        received: ReceivedFile | None = None,
    ) -> FileWriter[int]:
        with self._fitting(tree, relative, max_bytes, expected) as most:
            size = yield from tree.writing(relative, max_bytes=most, mode=mode, received=received)
        if (room := self._rooms.get(tree)) is not None:
            room.take(size)
        return size

    @contextmanager
    def _fitting(
        self, tree: Tree, relative: Relative, max_bytes: int, expected: int = 0
    ) -> Iterator[int]:
        """Yield the largest size of a file at this path: `max_bytes`, or less if the workspace has
        less room. Raise TooLarge, which names the workspace then."""
        room = self._rooms.get(tree)
        if room is None:
            yield max_bytes
            return
        replaced = 0
        with suppress(SbxError):
            replaced = tree.stat(relative).size or 0
        left = room.left(expected) + replaced
        try:
            yield min(max_bytes, left)
        except TooLarge as error:
            if left < max_bytes and error.code == "file_too_large":
                raise workspace_full(tree.shown(relative), room.max_bytes, left) from None
            raise

    def room_below(self, path: str) -> int | None:
        """Return the bytes that files below this directory may take; None without a limit."""
        tree, _ = self._at(f"{path}/x", changing=True)
        room = self._rooms.get(tree)
        return None if room is None else room.left()

    def stat(self, path: str) -> FileEntry:
        """Return the entry at the path; for a symlink, the link itself."""
        tree, relative = self._at(path)
        return tree.stat(relative)

    def list(self, path: str = ".", *, max_entries: int = 10_000, max_depth: int = 1) -> Listing:
        """Return the entries of a directory, down to `max_depth` levels; see `Listing`.

        The uploads and the shared files are separate mounts inside. They are listed where the code
        inside sees them.
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

    def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        """Return the entries below the directory `path` that match the glob `pattern`.

        Returns at most `max_results` entries, and at most RESULTS_MAX; see `Glob` and `Listing`.
        Raises BadRequest `invalid_pattern`.
        """
        base, places = self.places(path)
        return find(places, base, pattern, Walk(), kind=kind, max_results=_results(max_results))

    def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        include: str | None = None,
        max_matches: int = 1000,
    ) -> Matches:
        """Return the lines that contain `pattern` in the text files below `path`; see `Matches`.

        `pattern` is plain text, or an RE2 expression with `regex`. `include` restricts the search
        to files that match this glob. Raises BadRequest `invalid_pattern`.
        """
        expression = Expression(pattern, regex=regex, ignore_case=ignore_case)
        included = None if include is None else Glob(include)
        base, places = self.places(path)
        return Grep(expression, included, Walk(), _results(max_matches)).run(places, base)

    def copy(self, source: str, target: str, *, overwrite: bool = False) -> Copied:
        """Copy a file or a whole directory to a path that does not exist.

        With `overwrite`, a file replaces a file. The copy must fit into the free part of the limit
        of the workspace. Raises Conflict `file_exists`, TooLarge `file_too_large` and
        `tree_too_large`.
        """
        of, to = self._at(source), self._at(target, changing=True)
        host, room = self._host, self._rooms.get(to[0])
        with self._fitting(*to, _total(self._total_max_bytes)) as most:
            copied = copy(
                *of,
                *to,
                file_max=self._max_bytes,
                total_max=most,
                overwrite=overwrite,
                check=None if host is None else lambda tree: host.refuse_below(tree, (), at=to[1]),
            )
        if room is not None:
            room.take(copied.bytes)
        return copied

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move a file, a symlink itself or a directory to a path that does not exist.

        With `overwrite`, a file replaces a file. Raises Conflict `file_exists`.
        """
        of, to = self._at(source, changing=True), self._at(target, changing=True)
        host = self._host
        if host is not None:
            host.refuse_below(*of)
            host.refuse_below(*of, at=to[1])
        move(
            *of,
            *to,
            file_max=self._max_bytes,
            total_max=_total(self._total_max_bytes),
            overwrite=overwrite,
            check=None if host is None else lambda tree: host.refuse_below(tree, (), at=to[1]),
            # Code inside may add a name that is free at the source and protected at the target.
            by_copy=host is not None and not host.keeps_meaning(of[1], to[1]),
        )

    def replace(self, path: str, old: str, new: str, *, count: int | None = 1) -> int:
        """Replace a text that occurs `count` times in the file, and return the number of
        replacements. With None, replace all occurrences, of which there must be at least one.

        Raises Conflict `replace_count`, `file_changed`.
        """
        tree, relative = self._at(path, changing=True)
        with self._fitting(tree, relative, self._max_bytes) as most:
            return replace(tree, relative, old, new, count=count, max_bytes=most)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permissions of a file or a directory, 0 to 0o777. Raises Denied
        `set_id_refused`, `file_not_permitted`, BadRequest `invalid_mode`."""
        check_mode(mode)
        tree, relative = self._at(path, changing=True)
        chmod(tree, relative, mode, in_host_directory=self._host is not None)

    def places(self, path: str) -> tuple[str, Places]:
        """Return `path` as the code inside sees it, and each tree with the part of it that is
        visible below that path: the uploads and the shared files are separate trees."""
        tree, relative = self._at(path)
        base = tree.shown(relative)
        places: Places = [(tree, relative)]
        places += (
            (mounted, ())
            for mounted in (self._uploads, self._shared)
            if mounted is not None and mounted is not tree and mounted.view.startswith(f"{base}/")
        )
        return base, places

    def view(self, path: str, *, changing: bool = False, into: bool = False) -> str:
        """Return the path as the code inside sees it.

        `changing`: the caller will write to the path. `into`: the caller will write below it, so it
        may be one of the reserved directories of the workspace.
        """
        if into:
            self._at(f"{path}/x", changing=True)
        tree, relative = self._at(path, changing=changing)
        return tree.shown(relative)

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents. An existing directory stays unchanged."""
        tree, relative = self._at(path, changing=True)
        tree.make_directory(relative)

    def delete(self, path: str, *, deadline_s: float = 30.0) -> bool:
        """Delete a file, a symlink itself, or a whole directory.

        Return False if the deadline passed before all of it was removed. The name is gone in any
        case.
        """
        tree, relative = self._at(path, changing=True)
        if self._host is not None:
            self._host.refuse_below(tree, relative)
        return tree.delete(relative, deadline_s=deadline_s)

    def _at(self, path: str, *, changing: bool = False) -> tuple[Tree, Relative]:
        where = paths.resolve(path, changing=changing, uploads_apart=self._apart)
        match where:
            case Location(WorkspaceArea.UPLOADS, relative) if self._uploads is not None:
                return self._uploads, relative
            case Location(WorkspaceArea.UPLOADS, relative):
                return self._files, ("uploads", "temparea", *relative)
            case Location(WorkspaceArea.SHARED, relative) if self._shared is not None:
                return self._shared, relative
            case Location(WorkspaceArea.SHARED, relative):
                return self._files, ("shared", *relative)
        if changing and self._host is not None:
            self._host.refuse_change(where.relative)
        return self._files, where.relative

    def _limit(self, max_bytes: int | None) -> int:
        return self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)


def _total(limit: int | None) -> int:
    return _COPY_MAX if limit is None else limit


def _results(requested: int) -> int:
    return max(1, min(requested, RESULTS_MAX))
