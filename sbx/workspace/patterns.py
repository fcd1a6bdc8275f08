"""Compile search patterns: globs for names, plain text or regular expressions for content.

A hostile pattern or text could make a search endless, so RE2 runs all of them. Its time is linear
in the text for each pattern, and its memory is bounded. It does not backtrack, and therefore has no
back-references and no look-around. It releases the GIL.
"""

import re
from functools import lru_cache
from typing import Any

from sbx.errors import BadRequest

PATTERN_MAX = 1000  # characters
_MEMORY = 1 << 20  # bytes of a compiled pattern; this also bounds the time per byte of text
# Syntax that may match a line, but not a block of several lines.
_LINE_ONLY = re.compile(r"\\[AzQCE]|\(\?[a-zA-Z]*-")
_PARTS = re.compile(r"\*\*/|/\*\*\Z|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


class Expression:
    """A pattern for lines of bytes that are usually, but not always, UTF-8."""

    def __init__(self, pattern: str, *, regex: bool, ignore_case: bool) -> None:
        """Raise BadRequest `invalid_pattern` if RE2 cannot use the pattern."""
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
        """Return whether a line of `block` may match. False is certain."""
        return self._block is None or self._block.search(block) is not None

    def position(self, line: bytes) -> int | None:
        """Return the byte offset of the first match in the line, or None."""
        match = self._line.search(line)
        return None if match is None else int(match.start())


class Glob:
    """A pattern for paths: `*` and `?` within a name, `[a-z]`, `[!a-z]`, `**` over directories.

    A pattern without `/` matches the name alone, at any depth. A pattern with `/` matches the whole
    path below the search directory. Raises BadRequest `invalid_pattern`.
    """

    def __init__(self, pattern: str) -> None:
        _check(pattern)
        self._for_names = "/" not in pattern
        expression = glob_expression(pattern.removeprefix("./").strip("/"))
        self._compiled = _compiled(expression, literal=False, ignore_case=False)

    def matches(self, path: str) -> bool:
        """Return whether `path`, relative to the search directory, matches."""
        subject = path.rpartition("/")[2] if self._for_names else path
        return self._compiled.fullmatch(subject.encode()) is not None


def glob_expression(pattern: str) -> str:
    """Return the regular expression of a glob, for a full match. Pure."""
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
        raise _invalid("it must not contain a line break or a NUL")


@lru_cache(64)
def _compiled(pattern: str, *, literal: bool, ignore_case: bool) -> Any:
    import re2  # takes 10 ms, so only the first search imports it

    options = re2.Options()
    options.max_mem = _MEMORY
    options.log_errors = False
    options.literal = literal
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        raise _invalid(
            reason.decode(errors="replace") if isinstance(reason, bytes) else reason
        ) from None


def _invalid(reason: object) -> BadRequest:
    return BadRequest(
        f"the pattern cannot be used: {reason}",
        code="invalid_pattern",
        hint="use RE2 syntax (no back-references, no look-around), or search for plain text",
        details={"field": "pattern"},
    )
