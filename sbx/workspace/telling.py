"""Changes as a person is shown them: small diffs of small texts, and only so many of all.

The texts are hostile, and comparing lines takes time that grows with the square of their number: so
what is equal at both ends is left out first, and what is left may only have so many lines.
"""

import difflib
import time
from collections.abc import Callable, Sequence

from sbx.protocol.rehearsals import CHANGES_MAX, FileChange
from sbx.workspace.changes import Change, Node

FILE_MAX = 64 << 10  # bytes of a file whose lines are compared
DIFF_MAX = 4 << 10  # characters of one diff
_LINES_MAX = 400  # on either side, that are not equal at both ends
_ALL_S = 0.5
_CONTEXT = 3

Read = Callable[[Change], bytes | None]  # what a file holds, None where that is not to be had


def tell(
    changed: Sequence[Change], shown: Callable[[str], str], before: Read, after: Read
) -> tuple[tuple[FileChange, ...], bool]:
    """The first of them, and whether there are more. A directory is told by what lies in it, and
    itself where that is nothing, or its mode was changed."""
    end = time.monotonic() + _ALL_S
    full = {one.path.rpartition("/")[0] for one in changed}
    told: list[FileChange] = []
    for one in changed:
        if one.node.kind == "directory" and one.kind != "changed" and one.path in full:
            continue
        if len(told) >= CHANGES_MAX:
            return tuple(told), True
        diff = _diff(one, before, after) if time.monotonic() < end else None
        path = plain(shown(one.path)) + ("/" if one.node.kind == "directory" else "")
        told.append(FileChange(path, one.kind, _size(one.before), _size(one.after), diff))
    return tuple(told), False


def plain(text: str) -> str:
    """One line in which no character hides, reorders or begins another line: such ones are told by
    their numbers."""
    if text.isprintable():
        return text
    told = (one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return "".join(told)


def _size(node: Node | None) -> int | None:
    return node.size if node is not None and node.kind == "file" else None


def _diff(one: Change, before: Read, after: Read) -> str | None:
    lines = [*_modes(one)]
    if one.node.kind == "symlink":
        lines += [f"{sign}symlink to {_leads_to(node)}" for sign, node in _sides(one)]
    elif one.node.kind == "file" and one.content:
        old = _lines(one.before, before, one)
        new = _lines(one.after, after, one)
        if old is not None and new is not None:
            lines += unified(old, new)
    text = "\n".join(lines)
    if len(text) > DIFF_MAX:
        text = f"{text[:DIFF_MAX]}\n… (cut)"
    return text or None


def _modes(one: Change) -> list[str]:
    before, after = one.before, one.after
    if before is None or after is None or before.mode == after.mode:
        return []
    return [f"old mode {before.mode:04o}", f"new mode {after.mode:04o}"]


def _sides(one: Change) -> list[tuple[str, Node]]:
    return [(sign, node) for sign, node in (("-", one.before), ("+", one.after)) if node]


def _leads_to(node: Node) -> str:
    return plain((node.text or b"").decode("utf-8", "backslashreplace"))


def _lines(node: Node | None, read: Read, one: Change) -> list[str] | None:
    """None for what is no small text."""
    if node is None or node.size == 0:
        return []
    content = read(one) if node.size <= FILE_MAX else None
    if content is None or b"\0" in content:
        return None
    try:
        *lines, last = content.decode().split("\n")
    except UnicodeDecodeError:
        return None
    return [*lines, f"{last}\n\\ No newline at end of file"] if last else lines


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
