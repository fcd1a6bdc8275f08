"""Find what an existing host executable of a directory leads to, by a link or by its configuration.

The path guard protects by name. Three things need a look at the directory before a kernel starts:

    symlink      `.envrc -> config/envrc`: the target is as good as the name
    hard link    a protected file with a second name: protected by its inode
    git config   `core.hooksPath = tools/hooks`, `core.fsmonitor`, drivers, `include.path`: each
                 file or directory of the tree that a value names, also one that is not there yet;
                 and `.gitattributes`, where the configuration defines a driver
    .envrc       the files that it reads, by the words of its text
    environment  a directory with `pyvenv.cfg`: its path stays protected when it is moved

The walk follows no symlink and has limits. A link that the user makes while a kernel lives counts
from the next start of one.
"""

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from sbx.guest.path_rules import Parts, PathRules

ENTRIES_MAX = 100_000
DEADLINE_S = 3.0
_CONFIG_MAX = 256 << 10
_ALIASES_MAX = 2_000
_DRIVER = re.compile(r'^\s*\[\s*(?:filter|diff|merge)\s+"', re.IGNORECASE | re.MULTILINE)
_VALUE = re.compile(r"^\s*[A-Za-z][A-Za-z0-9-]*\s*=\s*(.+?)\s*$", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*path\s*=\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_HOOKS = re.compile(r"^\s*hookspath\s*=\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_INCLUDES_MAX = 20
_WORDS = re.compile(r"[^\s\"'!;&|()=]+")


@dataclass(slots=True)
class ExecutableLinks:
    """`aliases`: further paths to protect. `linked`: (device, inode) of protected files with more
    than one name. `protected`: the existing names of the table. `drivers`: whether a configuration
    of git defines a driver. `complete`: whether the walk saw the whole directory."""

    aliases: set[str] = field(default_factory=set)
    linked: set[tuple[int, int]] = field(default_factory=set)
    protected: list[str] = field(default_factory=list)
    drivers: bool = False
    complete: bool = True


def find_links(root: int, rules: PathRules) -> ExecutableLinks:
    """Walk the directory that the fd `root` holds. Blocks for `DEADLINE_S` seconds at most."""
    links = ExecutableLinks()
    until = time.monotonic() + DEADLINE_S
    top = os.path.realpath(f"/proc/self/fd/{root}")
    seen = 0
    pending: list[Parts] = [()]
    while pending:
        directory = pending.pop()
        for entry in _entries(root, directory):
            seen += 1
            if seen > ENTRIES_MAX or time.monotonic() > until:
                links.complete = False
                return links
            parts = (*directory, entry.name)
            if entry.name == "pyvenv.cfg" and directory:
                links.aliases.add("/".join(directory))
            is_directory = entry.is_dir(follow_symlinks=False)
            fits = rules.rules_for(entry.name.casefold())
            if not fits or rules.match_name(parts) is None:
                if is_directory:
                    pending.append(parts)
                continue
            links.protected.append("/".join(parts))
            if entry.is_symlink():
                _follow(top, parts, links)
            elif is_directory:
                _look_into(root, parts, links)
            else:
                _note_inode(entry, links)
            if entry.name.startswith(".envrc"):
                _read_envrc(top, parts, links)
            if entry.name == ".git" and len(links.aliases) < _ALIASES_MAX:
                _read_git_config(top, parts, links)
    return links


def _entries(root: int, directory: Parts) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError):
        fd = os.open(
            "/".join(directory) or ".",
            os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
            dir_fd=root,
        )
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)


def _follow(top: str, parts: Parts, links: ExecutableLinks) -> None:
    """The target of a protected symlink, where it lies in the directory."""
    _protect(top, os.path.join(top, *parts), links)
    links.aliases.discard("/".join(parts))  # by its name already


def _protect(top: str, path: str, links: ExecutableLinks) -> None:
    """The file that a path leads to, and each symlink on the way, which code could replace."""
    real = os.path.realpath(path)
    if real.startswith(f"{top}/") and "/.git/" not in real:  # that is protected by its name
        links.aliases.add(real[len(top) + 1 :])
    plain = os.path.normpath(path)
    if plain.startswith(f"{top}/"):
        parts = plain[len(top) + 1 :].split("/")
        for depth in range(1, len(parts) + 1):
            step = "/".join(parts[:depth])
            if os.path.islink(f"{top}/{step}"):
                links.aliases.add(step)


def _look_into(root: int, parts: Parts, links: ExecutableLinks) -> None:
    """Links in a protected directory: `.git/hooks/pre-commit -> ../../tools/check`."""
    top = os.path.realpath(f"/proc/self/fd/{root}")
    wanted = (parts, (*parts, "hooks")) if parts[-1] == ".git" else (parts,)
    for directory in wanted:
        for entry in _entries(root, directory):
            if entry.is_symlink():
                _follow(top, (*directory, entry.name), links)
            else:
                _note_inode(entry, links)


def _note_inode(entry: os.DirEntry[str], links: ExecutableLinks) -> None:
    with suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            links.linked.add((found.st_dev, found.st_ino))


def _read_git_config(top: str, parts: Parts, links: ExecutableLinks) -> None:
    """Protect each file of the tree that a value of the repository's configuration names."""
    work_tree = os.path.join(top, *parts[:-1])
    with suppress(OSError, ValueError):
        git, text = _config_of(os.path.join(top, *parts))
        for name in ("config.worktree", "info/attributes"):
            with suppress(OSError):
                text += _read(os.path.join(git, name))
        for path in _INCLUDE.findall(text)[:_INCLUDES_MAX]:
            with suppress(OSError):
                text += _read(os.path.join(git, os.path.expanduser(path)))
        links.drivers = links.drivers or _DRIVER.search(text) is not None
        for value in _VALUE.findall(text):
            for word in _WORDS.findall(value):
                _protect_named(top, work_tree, word, links)
                _protect_named(top, git, word, links)  # an include
        for path in _HOOKS.findall(text):
            _protect(top, os.path.join(work_tree, os.path.expanduser(path)), links)


def _read_envrc(top: str, parts: Parts, links: ExecutableLinks) -> None:
    """direnv(1) asks about `.envrc` only, not about the files that it reads."""
    directory = os.path.join(top, *parts[:-1])
    with suppress(OSError, ValueError):
        text = _read(os.path.join(top, *parts))
        if "dotenv" in text:
            links.aliases.add("/".join((*parts[:-1], ".env")))
        for word in _WORDS.findall(text):
            _protect_named(top, directory, word, links)


def _protect_named(top: str, base: str, word: str, links: ExecutableLinks) -> None:
    """A word that names a file, or that can only be a path of one that is not there yet."""
    path = os.path.join(base, os.path.expanduser(word))
    is_path = "/" in word.strip("/") and "://" not in word
    # The tree itself, or a directory above it, is not a program.
    above = f"{base}/".startswith(f"{os.path.realpath(path)}/")
    if (os.path.lexists(path) or is_path) and not above and len(links.aliases) < _ALIASES_MAX:
        _protect(top, path, links)


def _config_of(git: str) -> tuple[str, str]:
    """The directory of a repository that has its configuration, and the text of that. `git` is the
    directory in its work tree, or the file of a worktree or submodule that leads to it."""
    if os.path.isfile(git):
        gitdir = _read(git).partition("gitdir:")[2].strip()
        git = os.path.join(os.path.dirname(git), gitdir)
    with suppress(OSError):
        git = os.path.join(git, _read(os.path.join(git, "commondir")).strip())
    return git, _read(os.path.join(git, "config"))


def _read(path: str) -> str:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), encoding="utf-8", errors="replace") as file:
        return file.read(_CONFIG_MAX)
