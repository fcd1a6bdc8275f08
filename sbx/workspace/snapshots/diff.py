"""Describe changes for a user: diffs of texts, with limits. Omitted content has a reason.

The texts are hostile, and comparing lines takes quadratic time. So equal lines at both ends are
removed first, and the rest may only have a limited number of lines.
"""

import difflib
import json
import time
from collections.abc import Callable, Sequence

from sbx.protocol.dry_runs import CHANGES_MAX, FileChange
from sbx.protocol.invisible import escaped
from sbx.workspace.snapshots.manifest import FileNode, PlannedChange
from sbx.workspace.tree import Tree

FILE_MAX = 1 << 20  # bytes of a file whose lines are compared
DIFF_MAX = 64 << 10  # characters of one diff
_ALL_MAX = 1 << 20  # characters of all diffs together, as JSON has them
_LINES_MAX = 400  # on each side, without the equal lines at both ends
_ALL_S = 2.0
_FOREIGN = 0.3  # maximum share of bytes that are not UTF-8 in a text
_CONTEXT = 3

Read = Callable[
    [PlannedChange], bytes | None
]  # the content of a file, or None if it is unavailable


def tell(
    changed: Sequence[PlannedChange], shown: Callable[[str], str], before: Read, after: Read
) -> tuple[tuple[FileChange, ...], bool]:
    """Return the first changes, and whether there are more.

    A new or removed directory is listed only if none of its entries changed or its mode is unusual.
    """
    budget = _Budget()
    full = {change.path.rpartition("/")[0] for change in changed}
    described: list[FileChange] = []
    for change in changed:
        modes = _modes(change)
        is_shown = change.node.kind != "directory" or change.kind == "changed" or bool(modes)
        if not is_shown and change.path in full:
            continue
        if len(described) >= CHANGES_MAX:
            return tuple(described), True
        diff = "\n".join([*modes, *budget.spend(change, before, after)]) or None
        path = plain(shown(change.path)) + ("/" if change.node.kind == "directory" else "")
        described.append(
            FileChange(path, change.kind, _size(change.before), _size(change.after), diff)
        )
    return tuple(described), budget.is_cut


class _Budget:
    """The limits of all diffs together. `is_cut`: a diff is incomplete."""

    def __init__(self) -> None:
        self._end = time.monotonic() + _ALL_S
        self._remaining = _ALL_MAX
        self.is_cut = False

    def spend(self, change: PlannedChange, before: Read, after: Read) -> list[str]:
        """Return the diff of one change, or the reason why it is omitted."""
        if change.node.kind == "symlink":
            return [f"{sign}symlink to {_leads_to(node)}" for sign, node in _sides(change)]
        if change.node.kind != "file" or not change.content:
            return []
        if time.monotonic() > self._end:
            return self._cut("the other changes took too long to compare")
        if self._remaining <= 0:
            return self._cut("the other changes are too large")
        try:
            lines = unified(
                _lines(change.before, before, change), _lines(change.after, after, change)
            )
        except _NotShownError as error:
            return [f"content not shown: {error}"]
        text = "\n".join(map(_legible, lines))
        if len(text) > DIFF_MAX:
            self.is_cut = True
            left_out = text.count("\n", DIFF_MAX) + 1
            text = f"{text[:DIFF_MAX]}\n… (cut: {left_out} more lines)"
        self._remaining -= len(json.dumps(text))
        return [text] if text else []

    def _cut(self, reason: str) -> list[str]:
        self.is_cut = True
        return [f"content not shown: {reason}"]


class _NotShownError(Exception):
    """The reason why a content has no diff."""


def shown_in(tree: Tree) -> Callable[[str], str]:
    """Return a function that returns the path of a change as the code inside sees it."""
    return lambda path: f"{tree.view}/{path}"


def plain(text: str) -> str:
    """Return the text as one line without characters that hide or reorder text or begin a line.

    Such a character is written as its number, and a backslash is doubled.
    """
    return escaped(text.replace("\\", "\\\\"))


def _size(node: FileNode | None) -> int | None:
    return node.size if node is not None and node.kind == "file" else None


def _modes(change: PlannedChange) -> list[str]:
    """Return the modes that a commit changes, or that are unusual for a new file."""
    before, after = change.before, change.after
    if after is None:
        return []
    lines = _new_mode(after) if before is None else []
    if before is not None and before.mode != after.mode:
        lines = [f"old mode {before.mode:04o}", f"new mode {after.mode:04o}"]
    if set_id := after.set_id | (0 if before is None else before.set_id):
        lines.append(f"set-id bits {set_id:04o}: not kept")
    return lines


def _new_mode(node: FileNode) -> list[str]:
    if node.kind == "file" and node.mode != 0o644:
        return [f"new file mode {0o100000 | node.mode:06o}"]
    if node.kind == "directory" and node.mode != 0o755:
        return [f"new directory mode {0o040000 | node.mode:06o}"]
    return []


def _sides(change: PlannedChange) -> list[tuple[str, FileNode]]:
    return [(sign, node) for sign, node in (("-", change.before), ("+", change.after)) if node]


def _leads_to(node: FileNode) -> str:
    return plain((node.text or b"").decode("utf-8", "surrogateescape"))


def _lines(node: FileNode | None, read: Read, change: PlannedChange) -> list[str]:
    """Return the lines of a text, in which a byte that is not UTF-8 is a lone surrogate."""
    if node is None or node.size == 0:
        return []
    if node.size > FILE_MAX:
        raise _NotShownError(f"too large, {node.size} bytes")
    content = read(change)
    if content is None:
        raise _NotShownError("it cannot be read")
    foreign = len(content) - len(content.decode("utf-8", "ignore").encode())
    if b"\0" in content or foreign > _FOREIGN * len(content):
        raise _NotShownError("binary")
    *lines, last = content.decode("utf-8", "surrogateescape").split("\n")
    return [*lines, f"{last}\n\\ No newline at end of file"] if last else lines


def _legible(line: str) -> str:
    """Return a line with each byte that is not UTF-8 written as `\\xff`."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def unified(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the hunks of a unified diff, without the two header lines. Pure."""
    shorter = min(len(old), len(new))
    start = 0
    while start < shorter and old[start] == new[start]:
        start += 1
    end = 0
    while end < shorter - start and old[-1 - end] == new[-1 - end]:
        end += 1
    first = max(0, start - _CONTEXT)
    a = old[first : len(old) - max(0, end - _CONTEXT)]
    b = new[first : len(new) - max(0, end - _CONTEXT)]
    if max(len(a), len(b)) > _LINES_MAX:
        head, tail = start - first, min(end, _CONTEXT)
        replaced = ("replace", head, len(a) - tail, head, len(b) - tail)
        groups = [[("equal", 0, head, 0, head), replaced, _tail(replaced, tail)]]
    else:
        groups = list(difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(_CONTEXT))
    return [line for group in groups for line in _hunk(group, a, b, first)]


def _tail(replaced: tuple[str, int, int, int, int], tail: int) -> tuple[str, int, int, int, int]:
    _, _, i, _, j = replaced
    return "equal", i, i + tail, j, j + tail


def _hunk(
    group: Sequence[tuple[str, int, int, int, int]], a: Sequence[str], b: Sequence[str], first: int
) -> list[str]:
    (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
    lines = [f"@@ -{_range(first + i1, i2 - i1)} +{_range(first + j1, j2 - j1)} @@"]
    for tag, start, end, other, other_end in group:
        if tag == "equal":
            lines += [f" {line}" for line in a[start:end]]
            continue
        lines += [f"-{line}" for line in a[start:end]]
        lines += [f"+{line}" for line in b[other:other_end]]
    return lines


def _range(start: int, count: int) -> str:
    return f"{start + 1 if count else start},{count}"
