"""Find the files from a sandbox that a program of the host would obey.

A command that fetches a whole directory leaves them out: the user named the directory and not the
files. The table is in `sbx.workspace.host_executables`. This module does not check a file that the
user names: it is the user's own choice.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sbx.cli.terminal import STDERR, one_line, write
from sbx.guest.path_rules import Parts, reason
from sbx.runtime.settings import Settings
from sbx.workspace.host_executables import path_rules

_NAMED_MAX = 20


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One file or directory that was not fetched. `path` is relative to the fetched directory, and
    "." is that directory itself."""

    path: str
    name: str
    program: str

    @property
    def why(self) -> str:
        return reason(self.name, self.program)


class Arrivals:
    """The entries of one fetched directory.

    They are judged together, because three harmless names can form a repository.

    `paths` are relative to the directory, which arrives as `target`. Files that are at the target
    already count too, since a fetched file could complete a repository there.
    """

    def __init__(self, paths: Iterable[str], target: Path) -> None:
        protection = Settings().protection
        self._rules = path_rules(add=protection.add, remove=protection.remove)
        self._left_out: dict[str, LeftOut] = {}
        top = Path(os.path.abspath(target))
        self._top: Parts = (top.name or "root",)
        arriving: set[Parts] = {self._top}
        for path in paths:
            parts: Parts = (*self._top, *path.casefold().split("/"))
            arriving.update(parts[:depth] for depth in range(2, len(parts) + 1))

        @cache
        def exists(parts: Parts) -> bool:
            folded = (*parts[:1], *(part.casefold() for part in parts[1:]))
            return folded in arriving or os.path.lexists(top.parent.joinpath(*parts))

        self._exists = exists

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """The entries that `permits` refused, without the entries below them."""
        return list(self._left_out.values())

    def permits(self, path: str) -> bool:
        """Return whether no program of the host would obey this entry."""
        parts = tuple(path.split("/"))
        placed = (*self._top, *parts)
        # Check the place of the entry in the directory, and the place of the directory itself: its
        # name counts, too.
        if (match := self._rules.match(placed, self._exists)) is not None:
            depth = match.depth - 1
        elif (match := self._rules.match_name(parts) or self._rules.match_new(parts)) is not None:
            depth = match.depth
        else:
            return True
        top = "/".join(parts[:depth]) or "."
        self._left_out.setdefault(top, LeftOut(top, match.name, match.program))
        return False


def report_left_out(items: Sequence[LeftOut], hint: str) -> None:
    """Name the entries on stderr. Their names come from the sandbox, and are escaped."""
    for item in items[:_NAMED_MAX]:
        write(STDERR, f"left out: {one_line(item.path)} ({one_line(item.why)})\n")
    if len(items) > _NAMED_MAX:
        write(STDERR, f"left out: {len(items) - _NAMED_MAX} more\n")
    if items:
        write(STDERR, f"hint: {hint}\n")
