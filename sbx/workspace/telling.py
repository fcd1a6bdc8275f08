"""Changes as a person is shown them: diffs of texts, and only so many of all. Whatever is not shown
is named, with the reason.

The texts are hostile, and comparing lines takes time that grows with the square of their number: so
what is equal at both ends is left out first, and what is left may only have so many lines.
"""

import difflib
import json
import time
from collections.abc import Callable, Sequence

from sbx.protocol.invisible import escaped
from sbx.protocol.rehearsals import CHANGES_MAX, FileChange
from sbx.workspace.changes import Change, Node
from sbx.workspace.tree import Tree

FILE_MAX = 1 << 20  # bytes of a file whose lines are compared
DIFF_MAX = 64 << 10  # characters of one diff
_ALL_MAX = 1 << 20  # characters of all diffs together, as JSON has them
_LINES_MAX = 400  # on either side, that are not equal at both ends
_ALL_S = 2.0
_FOREIGN = 0.3  # of the bytes of a text may be no UTF-8; where more are, it is no text
_CONTEXT = 3

Read = Callable[[Change], bytes | None]  # what a file holds, None where that is not to be had


def tell(
    changed: Sequence[Change], shown: Callable[[str], str], before: Read, after: Read
) -> tuple[tuple[FileChange, ...], bool]:
    """Return the first of them, and whether there is more. A directory is shown by what lies in it,
    and itself where that is nothing, or its mode is not the usual one."""
    budget = _Budget()
    full = {one.path.rpartition("/")[0] for one in changed}
    told: list[FileChange] = []
    for one in changed:
        modes = _modes(one)
        is_shown = one.node.kind != "directory" or one.kind == "changed" or bool(modes)
        if not is_shown and one.path in full:
            continue
        if len(told) >= CHANGES_MAX:
            return tuple(told), True
        diff = "\n".join([*modes, *budget.spend(one, before, after)]) or None
        path = plain(shown(one.path)) + ("/" if one.node.kind == "directory" else "")
        told.append(FileChange(path, one.kind, _size(one.before), _size(one.after), diff))
    return tuple(told), budget.is_cut


class _Budget:
    """How much of all changes is shown. `is_cut`: a diff is not whole."""

    def __init__(self) -> None:
        self._end = time.monotonic() + _ALL_S
        self._left = _ALL_MAX
        self.is_cut = False

    def spend(self, one: Change, before: Read, after: Read) -> list[str]:
        """Return the diff of one change, or the reason why it is not shown."""
        if one.node.kind == "symlink":
            return [f"{sign}symlink to {_leads_to(node)}" for sign, node in _sides(one)]
        if one.node.kind != "file" or not one.content:
            return []
        if time.monotonic() > self._end:
            return self._cut("the other changes took too long to compare")
        if self._left <= 0:
            return self._cut("the other changes are too large")
        try:
            lines = unified(_lines(one.before, before, one), _lines(one.after, after, one))
        except _NotShownError as error:
            return [f"content not shown: {error}"]
        text = "\n".join(map(_legible, lines))
        if len(text) > DIFF_MAX:
            self.is_cut = True
            left_out = text.count("\n", DIFF_MAX) + 1
            text = f"{text[:DIFF_MAX]}\n… (cut: {left_out} more lines)"
        self._left -= len(json.dumps(text))
        return [text] if text else []

    def _cut(self, reason: str) -> list[str]:
        self.is_cut = True
        return [f"content not shown: {reason}"]


class _NotShownError(Exception):
    """The reason why a content has no diff."""


def shown_in(tree: Tree) -> Callable[[str], str]:
    """Return the function that gives the path of a change as the code inside sees it."""
    return lambda path: f"{tree.view}/{path}"


def plain(text: str) -> str:
    """Return the text as one line in which no character hides, reorders or begins another line:
    such a character is written by its number, and a backslash is doubled."""
    return escaped(text.replace("\\", "\\\\"))


def _size(node: Node | None) -> int | None:
    return node.size if node is not None and node.kind == "file" else None


def _modes(one: Change) -> list[str]:
    """Return the modes that a commit changes, or sets to others than a new file has as a rule."""
    before, after = one.before, one.after
    if after is None:
        return []
    lines = _new_mode(after) if before is None else []
    if before is not None and before.mode != after.mode:
        lines = [f"old mode {before.mode:04o}", f"new mode {after.mode:04o}"]
    if set_id := after.set_id | (0 if before is None else before.set_id):
        lines.append(f"set-id bits {set_id:04o}: not kept")
    return lines


def _new_mode(node: Node) -> list[str]:
    if node.kind == "file" and node.mode != 0o644:
        return [f"new file mode {0o100000 | node.mode:06o}"]
    if node.kind == "directory" and node.mode != 0o755:
        return [f"new directory mode {0o040000 | node.mode:06o}"]
    return []


def _sides(one: Change) -> list[tuple[str, Node]]:
    return [(sign, node) for sign, node in (("-", one.before), ("+", one.after)) if node]


def _leads_to(node: Node) -> str:
    return plain((node.text or b"").decode("utf-8", "surrogateescape"))


def _lines(node: Node | None, read: Read, one: Change) -> list[str]:
    """Return the lines of a text, in which a byte that is not UTF-8 is a lone surrogate."""
    if node is None or node.size == 0:
        return []
    if node.size > FILE_MAX:
        raise _NotShownError(f"too large, {node.size} bytes")
    content = read(one)
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
    """The hunks of a unified diff, without the two lines of names; pure."""
    most = min(len(old), len(new))
    start = 0
    while start < most and old[start] == new[start]:
        start += 1
    end = 0
    while end < most - start and old[-1 - end] == new[-1 - end]:
        end += 1
    first = max(0, start - _CONTEXT)
    a = old[first : len(old) - max(0, end - _CONTEXT)]
    b = new[first : len(new) - max(0, end - _CONTEXT)]
    if max(len(a), len(b)) > _LINES_MAX:
        head, tail = start - first, min(end, _CONTEXT)
        whole = ("replace", head, len(a) - tail, head, len(b) - tail)
        groups = [[("equal", 0, head, 0, head), whole, _tail(whole, tail)]]
    else:
        groups = list(difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(_CONTEXT))
    return [line for group in groups for line in _hunk(group, a, b, first)]


def _tail(whole: tuple[str, int, int, int, int], tail: int) -> tuple[str, int, int, int, int]:
    _, _, i, _, j = whole
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
