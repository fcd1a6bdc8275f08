"""Read a configuration file of git: git-config(1), "Syntax". Pure: text in, settings out.

This is our own parser for these reasons. `git config --file` starts a process for each file of each
walk, and git is not on every host. dulwich is a package of 1.5 MB with compiled parts. GitPython
reads the INI dialect of Python, which refuses files that git accepts. A test compares this module
with git.

The parser continues after an error that makes git refuse a file: another version of git may accept
the file.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

_VALUE = r"""(?:[^"\\\n\#;]|\\(?:\n|[btn"\\])|"(?:[^"\\\n]|\\(?:\n|[btn"\\]))*+")*+"""
_TOKEN = re.compile(
    r"""
      [ \t\r\n]++
    | [#;][^\n]*+
    | \[(?P<section>[A-Za-z0-9.-]*+)(?:[ \t\r]++"(?P<sub>(?:[^"\\\n]|\\[^\n])*+)")?+\]
    | (?P<name>[A-Za-z][A-Za-z0-9-]*+)[ \t]*+
      (?:=(?P<value>{value})(?:[#;][^\n]*+)?+)?+(?=\n|\Z)
    """.replace("{value}", _VALUE),
    re.VERBOSE,
)
_PIECE = re.compile(r'"|\\(.|\n)|[ \t\r]+|[^"\\ \t\r]+')
_ESCAPES = {"t": "\t", "n": "\n", "b": "\b", "\n": ""}


class GitSetting(NamedTuple):
    """A setting. `key` has the section and the name in lower case, and the subsection between them
    unchanged. `value` is None for a name without `=`, which means true."""

    key: str
    value: str | None


@lru_cache(maxsize=64)
def parse(text: str) -> tuple[GitSetting, ...]:
    """Return the settings of a file, in their order. Included files are not read."""
    return tuple(_settings(text.removeprefix("\ufeff").replace("\r\n", "\n") + "\n"))


def _settings(text: str) -> Iterator[GitSetting]:
    section, at = "", 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            at = text.find("\n", at) + 1 or len(text)
            continue
        at = token.end()
        if token["section"] is not None:
            section = token["section"].lower() + "."
            if token["sub"] is not None:
                section += re.sub(r"\\(.)", r"\1", token["sub"]) + "."
        elif token["name"] is not None:
            value = token["value"]
            yield GitSetting(
                section + token["name"].lower(), None if value is None else _plain(value)
            )


def _plain(value: str) -> str:
    """Remove the quotes, the escapes and the surrounding blanks of a value."""
    if '"' not in value and "\\" not in value:
        return value.strip(" \t\r")
    text, blank, quoted = "", "", False
    for piece in _PIECE.finditer(value):
        part = piece[0]
        if part[0] in " \t\r" and not quoted:
            blank = (blank + part) if text else ""
            continue
        text, blank = text + blank, ""
        if part == '"':
            quoted = not quoted
        elif piece[1] is not None:
            text += _ESCAPES.get(piece[1], piece[1])
        else:
            text += part
    return text
