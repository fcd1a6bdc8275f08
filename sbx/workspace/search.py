"""Search by name and by content, in bounded time, bytes and entries; what was cut says so."""

import stat
from collections.abc import Iterator

from sbx.errors import InvalidPath, NotFound, SbxError
from sbx.protocol.files import Kind, Listing, Match, Matches
from sbx.workspace.expressions import Expression, Glob
from sbx.workspace.listing import entry_of
from sbx.workspace.streams import OpenFile
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

BLOCK = 64 * 1024  # bytes that are matched at once, and the longest line
FILE_MAX = 64 << 20  # bytes
TOTAL_MAX = 1 << 30  # bytes
TEXT_MAX = 300  # characters of a line that are told

Places = list[tuple[Tree, Relative]]


def find(
    places: Places, base: str, pattern: str, walk: Walk, *, kind: Kind | None, max_results: int
) -> Listing:
    """What lies below `places` and matches the glob, told by path from `base`."""
    glob = Glob(pattern)
    listing = Listing()
    for tree, relative in places:
        for below, found in tree.walk(walk, relative):
            entry = entry_of(tree.shown(below), found)
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
    """One search by content; `run` gives what was found."""

    def __init__(
        self, expression: Expression, include: Glob | None, walk: Walk, max_matches: int
    ) -> None:
        self._expression = expression
        self._include = include
        self._walk = walk
        self._most = max_matches
        self._bytes_left = TOTAL_MAX
        self._found = Matches()

    def run(self, places: Places, base: str) -> Matches:
        for tree, relative in places:
            self._tree(tree, relative, base)
        self._found.complete = self._walk.complete
        self._found.sort(key=lambda match: (match.path, match.line))
        return self._found

    def _tree(self, tree: Tree, relative: Relative, base: str) -> None:
        if tree.stat(relative).kind == "file":
            self._file(tree, relative)
            return
        for below, found in tree.walk(self._walk, relative):
            if not stat.S_ISREG(found.st_mode):
                continue
            path = tree.shown(below).removeprefix(f"{base}/")
            if self._include is not None and not self._include.matches(path):
                continue
            self._file(tree, below)
            if self._over():
                return

    def _over(self) -> bool:
        if len(self._found) >= self._most or self._bytes_left <= 0 or not self._walk.in_time:
            self._walk.cut()
            return True
        return False

    def _file(self, tree: Tree, relative: Relative) -> None:
        try:
            file = tree.open(relative)
        except NotFound:
            return
        except InvalidPath:  # swapped for something that is no file
            self._found.skipped += 1
            return
        except SbxError:
            self._found.skipped += 1
            self._walk.cut()
            return
        with file:
            if file.size > FILE_MAX:
                self._found.skipped += 1
                self._walk.cut()
                return
            before = len(self._found)
            try:
                self._read(file)
            except _NotTextError:
                del self._found[before:]
                self._found.skipped += 1
            except OSError:
                self._walk.cut()
            else:
                self._found.files += 1

    def _read(self, file: OpenFile) -> None:
        for first, block in _blocks(self._counted(file)):
            if b"\0" in block:
                raise _NotTextError
            if not self._expression.may_match(block):
                continue
            for number, line in enumerate(block.split(b"\n"), first):
                if (position := self._expression.position(line)) is not None:
                    self._found.append(_match(file.path, number, position, line))
                    if len(self._found) >= self._most:
                        self._walk.cut()
                        return
            if self._over():
                return

    def _counted(self, file: OpenFile) -> Iterator[bytes]:
        for piece in file.chunks():
            self._bytes_left -= len(piece)
            yield from (piece[at : at + BLOCK] for at in range(0, len(piece), BLOCK))
            if self._over():
                return


class _NotTextError(Exception):
    pass


def _blocks(pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Whole lines, several at once, with the number of the first. A line longer than BLOCK comes in
    parts, each with its number."""
    number, rest = 1, b""
    for piece in pieces:
        rest += piece
        end = rest.rfind(b"\n")
        if end < 0:
            if len(rest) >= BLOCK:
                yield number, rest
                rest = b""
            continue
        block, rest = rest[:end], rest[end + 1 :]
        yield number, block
        number += block.count(b"\n") + 1
    if rest:
        yield number, rest


def _match(path: str, number: int, position: int, line: bytes) -> Match:
    column = len(line[:position].decode("utf-8", "replace")) + 1
    text = line[: TEXT_MAX * 4].decode("utf-8", "replace").rstrip("\r")[:TEXT_MAX]
    return Match(path, number, column, text)
