"""What is searched for: globs for names, text or regular expressions for content.

Both the pattern and what it meets may be made to take for ever, so all of them are run by RE2: its
time is linear in the text whatever the pattern is, its memory is bounded, it has no backtracking
and, for that, no back-references and no look-around. It works without the interpreter's lock.
"""

import re
from functools import lru_cache
from typing import Any

from sbx.errors import BadRequest

PATTERN_MAX = 1000  # characters
_MEMORY = 1 << 20  # bytes, of a compiled pattern: so is the time per byte of text bounded
# What a line would match, and a block of several lines might not.
_LINE_ONLY = re.compile(r"\\[AzQCE]|\(\?[a-zA-Z]*-")
_PARTS = re.compile(r"\*\*/|/\*\*\Z|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


class Expression:
    """A pattern for lines of bytes that should be UTF-8, and need not."""

    def __init__(self, pattern: str, *, regex: bool, ignore_case: bool) -> None:
        """Raises BadRequest `invalid_pattern`."""
        _check(pattern)
        self._line = _compiled(pattern, literal=not regex, ignore_case=ignore_case)
        self._block = self._line
        if regex:
            wrapped = f"(?m:{pattern})"
            self._block = (
                None
                if _LINE_ONLY.search(pattern)
                else _compiled(wrapped, literal=False, ignore_case=ignore_case)
            )

    def may_match(self, block: bytes) -> bool:
        """Whether a line of `block` may match: false is certain."""
        return self._block is None or self._block.search(block) is not None

    def position(self, line: bytes) -> int | None:
        """Where the first match in the line begins, in bytes; None where there is none."""
        found = self._line.search(line)
        return None if found is None else int(found.start())


class Glob:
    """A pattern for paths: `*` and `?` within a name, `[a-z]`, `[!a-z]`, `**` over directories.

    One without a `/` is for the name alone, at any depth; one with it is for the whole path below
    the directory that is searched. Raises BadRequest `invalid_pattern`.
    """

    def __init__(self, pattern: str) -> None:
        _check(pattern)
        self._for_names = "/" not in pattern
        expression = glob_expression(pattern.removeprefix("./").strip("/"))
        self._compiled = _compiled(expression, literal=False, ignore_case=False)

    def matches(self, path: str) -> bool:
        """`path` relative to the directory that is searched."""
        subject = path.rpartition("/")[2] if self._for_names else path
        return self._compiled.fullmatch(subject.encode()) is not None


def glob_expression(pattern: str) -> str:
    """The regular expression of a glob, for a whole match; pure."""
    return "(?s)" + "".join(_part(match[0]) for match in _PARTS.finditer(pattern))


def _part(part: str) -> str:
    match part:
        case "**/":
            return "(?:[^/]+/)*"
        case "/**":
            return "/.+"
        case "**":
            return ".*"
        case "*":
            return "[^/]*"
        case "?":
            return "[^/]"
    if len(part) > 2 and part[0] == "[":
        negated = part[1] == "!"
        inside = part[2 if negated else 1 : -1]
        if inside:
            safe = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside)
            return f"[{'^/' if negated else ''}{safe}]"
    return "".join(map(_literal, part))


def _literal(char: str) -> str:
    return char if char.isalnum() or char == "_" or ord(char) > 127 else f"\\{char}"


def _check(pattern: str) -> None:
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise _invalid("it cannot be written as UTF-8") from error
    if not pattern or len(pattern) > PATTERN_MAX:
        raise _invalid(f"it must have 1 to {PATTERN_MAX} characters")
    if "\0" in pattern or "\n" in pattern:
        raise _invalid("it is for one line, and has no line break and no NUL")


@lru_cache(64)
def _compiled(pattern: str, *, literal: bool, ignore_case: bool) -> Any:
    import re2  # 10 ms, for the first who searches

    options = re2.Options()
    options.max_mem = _MEMORY
    options.log_errors = False
    options.literal = literal
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        told = error.args[0] if error.args else error
        raise _invalid(told.decode(errors="replace") if isinstance(told, bytes) else told) from None


def _invalid(why: object) -> BadRequest:
    return BadRequest(
        f"the pattern cannot be used: {why}",
        code="invalid_pattern",
        hint="RE2's syntax: no back-references, no look-around; or search for plain text",
        details={"field": "pattern"},
    )
