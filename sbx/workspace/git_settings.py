"""The settings of git that apply in a work tree: git-config(1), "FILES". No program is executed.

Each `includeIf` counts, because its condition may become true later.

`parse` is our own parser of a configuration file (git-config(1), "Syntax") for these reasons. `git
config --file` starts a process for each file of each walk, and git is not on every host. dulwich is
a package of 1.5 MB with compiled parts. GitPython reads the INI dialect of Python, which refuses
files that git accepts. A test compares this parser with git. It continues after an error that makes
git refuse a file: another version of git may accept the file.
"""

import os
import pwd
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from sbx.workspace.small_files import read_small

_FILES_MAX = 30
_DEPTH_MAX = 10  # as git
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


class Repository(Struct, frozen=True):
    """The directories of a repository.

    `work_tree` contains `.git`. `git` has the files of this work tree, and `common` has the files
    that all work trees of the repository share.
    """

    work_tree: str
    git: str
    common: str

    @classmethod
    def at(cls, work_tree: str) -> "Repository":
        """Find the directories of a repository by `.git`. Raises OSError, ValueError."""
        git = os.path.join(work_tree, ".git")
        if os.path.isfile(git):  # in a worktree or a submodule
            git = os.path.join(work_tree, read_small(git).partition("gitdir:")[2].strip())
        common = git
        with suppress(OSError):
            common = os.path.join(git, read_small(os.path.join(git, "commondir")).strip())
        return cls(work_tree, git, common)


class FileSettings(Struct, frozen=True):
    """The settings of the file `path`, without included files. `home` is the home of the user whose
    git reads the file."""

    path: str
    settings: Sequence[GitSetting]
    home: str


def settings_of_repository(repository: Repository, home: str) -> list[FileSettings]:
    names = (f"{repository.common}/config", f"{repository.git}/config.worktree")
    return list(_read(names, home))


def settings_of_user(owner: int) -> list[FileSettings]:
    """Return the settings of the system, of the user of this process and of the user `owner`."""
    files = []
    for home in homes(owner):
        names = [f"{home}/.gitconfig", f"{home}/.config/git/config"]
        files += list(_read(names, home))
    names = ["/etc/gitconfig"]
    for variable in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        names.append(os.environ.get(variable, ""))
    if configured := os.environ.get("XDG_CONFIG_HOME"):
        names.append(f"{configured}/git/config")
    return [*files, *_read(names, os.path.expanduser("~"))]


def homes(owner: int) -> list[str]:
    """Return the home of the user `owner` of a directory, and the home of this process."""
    paths = [os.path.expanduser("~")]
    with suppress(KeyError):
        paths.insert(0, pwd.getpwuid(owner).pw_dir)
    return list(dict.fromkeys(paths))


def expanded(value: str, home: str) -> str:
    """Return the path that a value means to git: `~/` is the home of the user."""
    if value == "~" or value.startswith("~/"):
        return home + value[1:]
    return os.path.expanduser(value)


def _read(paths: Sequence[str], home: str) -> Iterator[FileSettings]:
    pending = [(path, 0) for path in paths if path]
    seen: set[str] = set()
    while pending and len(seen) < _FILES_MAX:
        path, depth = pending.pop(0)
        if path in seen:
            continue
        seen.add(path)
        with suppress(OSError, ValueError):
            settings = parse(read_small(path))
            yield FileSettings(path, settings, home)
            if depth < _DEPTH_MAX:
                pending += [
                    (os.path.join(os.path.dirname(path), expanded(value, home)), depth + 1)
                    for value in includes(settings)
                ]


def includes(settings: Sequence[GitSetting]) -> list[str]:
    """Return the paths that the settings include. They are relative to the file of the settings."""
    return [
        setting.value
        for setting in settings
        if setting.value
        and (setting.key == "include.path" or setting.key.startswith("includeif."))
        and setting.key.endswith(".path")
    ]
