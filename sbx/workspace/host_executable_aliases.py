"""Decide which paths of a directory are aliases: files that words of host executables name.

The host would execute an alias like a host executable. But a word may come from a command that does
not run. So an alias must not make an ordinary source directory read-only. `executed_words` has the
rule for words, and this module looks at the files.
"""

import os
import re
import stat
from collections.abc import Iterable, Sequence

from sbx.workspace.executed_words import Mention
from sbx.workspace.git_settings import expanded
from sbx.workspace.shell_commands import SCRIPT_DIRECTORY

ALIASES_MAX = 2_000
_WORD_MAX = 4096
_SCRIPTS = (".sh", ".bash", ".py", ".js", ".mjs", ".cjs", ".ts", ".rb", ".pl", ".lua", ".php")
_LEADING_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})/+")
_GLOB = re.compile(r"[*?\[]")


class Aliases:
    """The aliases of the directory `top`, as relative paths. `home` is the user's home, for `~`."""

    def __init__(self, top: str, home: str) -> None:
        self.top = top
        self.home = home
        self.paths: set[str] = set()
        self.import_roots: set[str] = set()

    def protect(self, path: str) -> None:
        """Protect the file that a path leads to, and each symlink on the way, which code could
        replace."""
        real = os.path.realpath(path)
        if real.startswith(f"{self.top}/") and "/.git/" not in real:  # its name protects it
            self.paths.add(real[len(self.top) + 1 :])
        plain = os.path.normpath(path)
        if plain.startswith(f"{self.top}/"):
            parts = plain[len(self.top) + 1 :].split("/")
            for depth in range(1, len(parts) + 1):
                step = "/".join(parts[:depth])
                if os.path.islink(f"{self.top}/{step}"):
                    self.paths.add(step)

    def protect_named(self, base: str, word: str) -> None:
        """Protect a file that a word names. With a slash in the word, it need not exist yet."""
        if self._is_free(base, word):
            path = self._path(base, word)
            if os.path.lexists(path) or _has_slash(word):
                self.protect(path)

    def protect_always(self, base: str, word: str) -> None:
        if self._is_free(base, word):
            self.protect(self._path(base, word))

    def is_above(self, base: str, word: str) -> bool:
        """Return whether the word names the base or a directory above it: neither is a program."""
        return f"{base}/".startswith(f"{os.path.realpath(self._path(base, word))}/")

    def take(self, bases: Iterable[str], mentions: Iterable[Mention], directory: str) -> list[str]:
        """Protect the mentioned files, and return the existing files that are executed.

        `bases` are the directories in which the script with these mentions could run. The script
        itself is in `directory`.
        """
        executed: list[str] = []
        for mention in mentions:
            word = mention.word.replace(SCRIPT_DIRECTORY, directory)
            variable = _LEADING_VARIABLE.match(word)
            word = word[variable.end() :] if variable else word
            kind = mention.kind
            if glob := _GLOB.search(word):
                if kind not in ("program", "script", "directory"):
                    continue
                kind, word = "directory", os.path.dirname(word[: glob.start()])
            if "$" not in word:
                for base in bases:
                    if kind == "module":
                        self._protect_module(base, word)
                    elif self._is_free(base, word):
                        plain = Mention(kind, word)
                        executed += self._take(base, plain, is_certain=variable is None)
        return executed

    def _take(self, base: str, mention: Mention, *, is_certain: bool) -> Sequence[str]:
        kind, word = mention
        path = self._path(base, word)
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            mode = 0
        is_file = stat.S_ISREG(mode)
        # A path that does not exist yet counts only if all of it is known.
        is_new = not mode and is_certain
        match kind:
            case "program":
                counts = _has_slash(word) and (is_file or is_new)
            case "script":
                counts = is_file or is_new
                if stat.S_ISDIR(mode):
                    for name in ("__main__.py", "index.js"):
                        self.protect(os.path.join(path, name))
            case "option":
                counts = is_file or (is_new and _has_slash(word))
            case "directory":
                counts = bool(mode) or is_new
            case "path":
                counts = bool(mode) or (is_new and _has_slash(word))
            case "word":
                counts = _has_slash(word) and is_file and bool(mode & 0o111)
            case "code":
                is_script = bool(mode & 0o111) or word.endswith(_SCRIPTS)
                counts = (is_file and is_script) or (is_new and word.startswith("./"))
            case "imports":
                self._add_import_root(path)
                counts = False
            case "module":
                counts = False
        if counts:
            self.protect(path)
            if word.endswith(".py"):
                self._add_import_root(os.path.dirname(path))
        return [path] if counts and is_file else []

    def _protect_module(self, base: str, name: str) -> None:
        """Protect the files that `python -m` would import from its working directory."""
        self._add_import_root(base)
        parts = name.split(".")
        if all(part.isidentifier() for part in parts) and len(self.paths) < ALIASES_MAX:
            for depth in range(1, len(parts) + 1):
                path = os.path.join(base, *parts[:depth])
                for ending in (".py", "/__init__.py"):
                    self.protect(path + ending)
            self.protect(path + "/__main__.py")

    def _add_import_root(self, directory: str) -> None:
        real = os.path.realpath(directory)
        if f"{real}/".startswith(f"{self.top}/"):
            self.import_roots.add(real[len(self.top) + 1 :])

    def _path(self, base: str, word: str) -> str:
        return os.path.join(base, expanded(word, self.home))

    def _is_free(self, base: str, word: str) -> bool:
        is_path = 0 < len(word) <= _WORD_MAX and "\0" not in word
        return is_path and len(self.paths) < ALIASES_MAX and not self.is_above(base, word)


def _has_slash(word: str) -> bool:
    return "/" in word.strip("/") and "://" not in word
