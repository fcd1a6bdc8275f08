"""Search by name and by content, with limits for time, bytes and entries, and report each cut."""

import stat
from collections.abc import Iterator

from sbx.errors import InvalidPath, NotFound, SbxError
from sbx.protocol.files import Kind, Listing, Match, Matches
from sbx.workspace.listing import entry_of
from sbx.workspace.patterns import Expression, Glob
from sbx.workspace.streams import OpenFile
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

BLOCK = 64 * 1024  # bytes per match; a longer line is split
FILE_MAX = 64 << 20  # bytes
TOTAL_MAX = 1 << 30  # bytes
TEXT_MAX = 300  # characters of a line in a match

Places = list[tuple[Tree, Relative]]


def find(
    places: Places, base: str, pattern: str, walk: Walk, *, kind: Kind | None, max_results: int
) -> Listing:
    """Return the entries below `places` whose path, relative to `base`, matches the glob."""
    glob = Glob(pattern)
    listing = Listing()
    for tree, relative in places:
        for below, status in tree.walk(walk, relative):
            entry = entry_of(tree.shown(below), status)
            if kind is not None and entry.kind != kind:
                continue
            if not glob.matches(entry.path.removeprefix(f"{base}/")):
                continue
            if len(listing) >= max_results:
                walk.cut()
                break
            listing.append(entry)
    listing.complete = walk.complete
    listing.sort(key=lambda entry: entry.path)
    return listing


class Grep:
    """One search by content. `run` returns the matches."""

    def __init__(
        self, expression: Expression, include: Glob | None, walk: Walk, max_matches: int
    ) -> None:
        self._expression = expression
        self._include = include
        self._walk = walk
        self._max_matches = max_matches
        self._bytes_left = TOTAL_MAX
        self._matches = Matches()

    def run(self, places: Places, base: str) -> Matches:
        for tree, relative in places:
            self._search_tree(tree, relative, base)
        self._matches.complete = self._walk.complete
        self._matches.sort(key=lambda match: (match.path, match.line))
        return self._matches

    def _search_tree(self, tree: Tree, relative: Relative, base: str) -> None:
        if tree.stat(relative).kind == "file":
            self._search_file(tree, relative)
            return
        for below, status in tree.walk(self._walk, relative):
            if not stat.S_ISREG(status.st_mode):
                continue
            path = tree.shown(below).removeprefix(f"{base}/")
            if self._include is not None and not self._include.matches(path):
                continue
            self._search_file(tree, below)
            if self._is_over():
                return

    def _is_over(self) -> bool:
        if (
            len(self._matches) >= self._max_matches
            or self._bytes_left <= 0
            or not self._walk.in_time
        ):
            self._walk.cut()
            return True
        return False

    def _search_file(self, tree: Tree, relative: Relative) -> None:
        try:
            file = tree.open(relative)
        except NotFound:
            return
        except InvalidPath:  # replaced by a node that is not a file
            self._matches.skipped += 1
            return
        except SbxError:
            self._matches.skipped += 1
            self._walk.cut()
            return
        with file:
            if file.size > FILE_MAX:
                self._matches.skipped += 1
                self._walk.cut()
                return
            before = len(self._matches)
            try:
                self._read(file)
            except _NotTextError:
                del self._matches[before:]
                self._matches.skipped += 1
            except OSError:
                self._walk.cut()
            else:
                self._matches.files += 1

    def _read(self, file: OpenFile) -> None:
        for first, block in _blocks(self._counted(file)):
            if b"\0" in block:
                raise _NotTextError
            if not self._expression.may_match(block):
                continue
            for number, line in enumerate(block.split(b"\n"), first):
                if (position := self._expression.position(line)) is not None:
                    self._matches.append(_match(file.path, number, position, line))
                    if len(self._matches) >= self._max_matches:
                        self._walk.cut()
                        return
            if self._is_over():
                return

    def _counted(self, file: OpenFile) -> Iterator[bytes]:
        for piece in file.chunks():
            self._bytes_left -= len(piece)
            yield from (piece[at : at + BLOCK] for at in range(0, len(piece), BLOCK))
            if self._is_over():
                return


class _NotTextError(Exception):
    pass


def _blocks(pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines, with the number of the first line.

    A line longer than BLOCK is split into parts with the same number.
    """
    number, pending = 1, b""
    for piece in pieces:
        pending += piece
        end = pending.rfind(b"\n")
        if end < 0:
            if len(pending) >= BLOCK:
                yield number, pending
                pending = b""
            continue
        block, pending = pending[:end], pending[end + 1 :]
        yield number, block
        number += block.count(b"\n") + 1
    if pending:
        yield number, pending


def _match(path: str, number: int, position: int, line: bytes) -> Match:
    column = len(line[:position].decode("utf-8", "replace")) + 1
    text = line[: TEXT_MAX * 4].decode("utf-8", "replace").rstrip("\r")[:TEXT_MAX]
    return Match(path, number, column, text)
