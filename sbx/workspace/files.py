"""The files of a conversation as callers name them: one path rule in front of up to three trees."""

from collections.abc import Iterable

from sbx.protocol.files import Copied, Entry, Kind, Listing, Matches
from sbx.workspace import paths
from sbx.workspace.copying import copy
from sbx.workspace.expressions import Expression, Glob
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.moving import move
from sbx.workspace.paths import Location, Part
from sbx.workspace.permissions import check_mode, chmod
from sbx.workspace.replacing import replace
from sbx.workspace.search import Grep, Places, find
from sbx.workspace.streams import Intake, OpenFile
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

DEFAULT_MAX_BYTES = 512 * 1024 * 1024
RESULTS_MAX = 10_000
_COPY_MAX = 4 * DEFAULT_MAX_BYTES


class Files:
    """Routes each call to the tree its path means; borrows the trees and closes none of them.

    `shared` is None where the policy does not share: `/workspace/shared` is then a directory like
    any other, only reserved. `uploads_apart` where a host directory is the workspace.
    `total_max_bytes` is what one tree may hold, None where that is not ours to say; `host` is the
    directory of the host that `files` are, where it refuses changes of host executables. All
    methods raise InvalidPath, and NotFound `file_not_found`; see `Tree` for what else.
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

    def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        """What lies below the directory `path` and matches the glob; see `Glob` and `Listing`.

        At most `max_results` of it, at most RESULTS_MAX. Raises BadRequest `invalid_pattern`.
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
        """The lines of the text files below `path` that have `pattern`: plain text, or with `regex`
        an expression of RE2's. `include`: only files that match this glob. See `Matches`.

        Raises BadRequest `invalid_pattern`.
        """
        expression = Expression(pattern, regex=regex, ignore_case=ignore_case)
        only = None if include is None else Glob(include)
        base, places = self.places(path)
        return Grep(expression, only, Walk(), _results(max_matches)).run(places, base)

    def copy(self, source: str, target: str, *, overwrite: bool = False) -> Copied:
        """Copy a file, or a directory with all below it, to a path that is not there; `overwrite`
        lets a file replace a file. It may take what the limit of the workspace leaves.

        Raises Conflict `file_exists`, TooLarge `file_too_large`, `tree_too_large`.
        """
        of, to = self._at(source), self._at(target, changing=True)
        room = self._total_max_bytes
        if room is not None:
            room = max(0, room - to[0].measure().bytes)
        host = self._host
        return copy(
            *of,
            *to,
            file_max=self._max_bytes,
            total_max=_total(room),
            overwrite=overwrite,
            check=None if host is None else lambda made: host.refuse_below(made, (), at=to[1]),
        )

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Give a file, a symlink itself, or a directory another path that is not there; `overwrite`
        lets a file replace a file. Raises Conflict `file_exists`."""
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
            check=None if host is None else lambda made: host.refuse_below(made, (), at=to[1]),
            # Code inside may add a name that is free here and not there.
            by_copy=host is not None and not host.keeps_meaning(of[1], to[1]),
        )

    def replace(self, path: str, old: str, new: str, *, count: int | None = 1) -> int:
        """Replace a text that is in the file `count` times; None: as often as it is there, once at
        least. How often it was. Raises Conflict `replace_count`, `file_changed`."""
        tree, relative = self._at(path, changing=True)
        return replace(tree, relative, old, new, count=count, max_bytes=self._max_bytes)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permissions of a file or a directory, 0 to 0o777. Raises Denied
        `set_id_refused`, `file_not_permitted`, BadRequest `invalid_mode`."""
        check_mode(mode)
        tree, relative = self._at(path, changing=True)
        chmod(tree, relative, mode, in_host_directory=self._host is not None)

    def places(self, path: str) -> tuple[str, Places]:
        """Where `path` is as the code inside sees it, and every tree that is seen there, with what
        of it is: a mount of its own lies in another tree."""
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
        """The path as the code inside sees it. `changing`: it is to be written; `into`: what lies
        below it is, so that it may be one of the workspace's own directories."""
        if into:
            self._at(f"{path}/x", changing=True)
        tree, relative = self._at(path, changing=changing)
        return tree.shown(relative)

    def make_directory(self, path: str) -> None:
        """Make a directory and those it needs; one that is there is left as it is."""
        tree, relative = self._at(path, changing=True)
        tree.make_directory(relative)

    def delete(self, path: str, *, deadline_s: float = 30.0) -> bool:
        """Delete a file, a symlink itself, or a directory with all below it.

        False when the time was up before all was removed; it is out of reach in any case.
        """
        tree, relative = self._at(path, changing=True)
        if self._host is not None:
            self._host.refuse_below(tree, relative)
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
        if changing and self._host is not None:
            self._host.refuse_change(where.relative)
        return self._files, where.relative

    def _limit(self, max_bytes: int | None) -> int:
        return self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)


def _total(limit: int | None) -> int:
    return _COPY_MAX if limit is None else limit


def _results(asked: int) -> int:
    return max(1, min(asked, RESULTS_MAX))
