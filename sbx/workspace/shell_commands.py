"""Split the text of a shell script into simple commands: bash(1), "SHELL GRAMMAR". Pure.

This is an approximation for one question: which files could the script execute? If in doubt, it
returns more commands: it includes branches that are never taken, and the bodies of functions and of
here documents.

    expanded     variables with a value in the script (each of its values), `$PWD`, the top of the
                 repository, the directory of the script (as `SCRIPT_DIRECTORY`)
    read         the commands in command substitutions, `eval`, `trap` and `sh -c`
    unchanged    other variables: their `$NAME` stays in the word
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct, field

SCRIPT_DIRECTORY = "\x02"
SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash", "fish"))
_DEPTH_MAX = 4
_COMMANDS_MAX = 5_000
_VALUES_MAX = 8
_WORD_MAX = 4096  # PATH_MAX

_OWN_PATH = re.compile(r'\$\(\s*(?:readlink\s+-f|realpath)\s+(?:--\s+)?"?\$\{?0\}?"?\s*\)')
_OWN_DIRECTORY = re.compile(
    r"""(?:\$\(|`)\s*dirname\s+(?:--\s+)?"?\$(?:0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(?:\[0\])?\})"?\s*[)`]
    |\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/\*\}""",
    re.VERBOSE,
)
_HERE = re.compile(
    r"""(?:\$\(|`)\s*(?:git\s+rev-parse\s+--show-toplevel|pwd(?:\s+-[PL])?)
        \s*(?:2>\s*/dev/null\s*)?[)`]
    |\$PWD\b|\$\{PWD\}|\$GIT_WORK_TREE\b|\$\{GIT_WORK_TREE\}""",
    re.VERBOSE,
)
_CD_AND_PWD = re.compile(
    r"""\$\(\s*cd\s+(?:-P\s+|--\s+)*"?([^"()`\s]*)"?\s*(?:>\s*/dev/null\s*(?:2>&1\s*)?)?
        (?:&&|;)\s*pwd(?:\s+-[PL])?\s*\)""",
    re.VERBOSE,
)
_TOKEN = re.compile(
    r"""
      [ \t\r]++ | \#[^\n]*+
    | (?P<redirection>[0-9]*+[<>]++[&|]?+[ \t]*+)
    | (?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*+"|\\.|[^\s'"\\;&|()`<>])++)
    | (?P<end>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=+]([^}]*)|[^}]*)\})")
_KEYWORDS = frozenset(
    (
        "if", "then", "else", "elif", "fi", "while", "until", "do", "done", "!", "{", "}",
        "time", "esac", "coproc",
    )
)  # fmt: skip
_DECLARATIONS = frozenset(("export", "local", "declare", "typeset", "readonly"))


class ShellScript(Struct):
    """A script. `commands` has the words of each simple command, without keywords and assignments.
    `assignments` has the name and the value of each assignment."""

    commands: list[tuple[str, ...]] = field(default_factory=list)
    assignments: list[tuple[str, str]] = field(default_factory=list)


@lru_cache(maxsize=64)
def read_script(text: str) -> ShellScript:
    """Return the commands of a script in their order. The caller must not change the result."""
    text = _OWN_PATH.sub("$0", text.replace("\\\n", ""))
    text = _HERE.sub(".", _OWN_DIRECTORY.sub(SCRIPT_DIRECTORY, text))
    reader = _Reader()
    reader.read(_CD_AND_PWD.sub(r"\1", text), 0)
    return reader.script


class _Reader:
    def __init__(self) -> None:
        self.script = ShellScript()
        self._values: dict[str, list[str]] = {}

    def read(self, text: str, depth: int) -> None:
        if depth > _DEPTH_MAX:
            return
        for words in _commands(text):
            if len(self.script.commands) > _COMMANDS_MAX:
                return
            for word in words:
                if "$(" in word or "`" in word:
                    self.read(re.split(r"\$\(|`", word, maxsplit=1)[1], depth + 1)
            self._take(words, depth)

    def _take(self, words: list[str], depth: int) -> None:
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        if words[:1] == ["for"] and len(words) > 3:
            for value in words[3:]:
                self._assign(words[1], value)
            return
        while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
            self._assign(assignment[1], assignment[2])
            words = words[1:]
        if words and words[0] in _DECLARATIONS:
            for word in words[1:]:
                if assignment := _ASSIGNMENT.fullmatch(word):
                    self._assign(assignment[1], assignment[2])
            return
        if not words:
            return
        for command in self._variants(words):
            self.script.commands.append(command)
            for text in _texts(command):
                self.read(text, depth + 1)

    def _assign(self, name: str, value: str) -> None:
        for variant in self._expand(value):
            self.script.assignments.append((name, variant))
            values = self._values.setdefault(name, [])
            if len(values) < _VALUES_MAX and variant not in values:
                values.append(variant)

    def _variants(self, words: list[str]) -> Iterator[tuple[str, ...]]:
        """Yield the command once for each value of its variables."""
        choices = [self._expand(word) for word in words]
        for number in range(max(map(len, choices))):
            yield tuple(choice[min(number, len(choice) - 1)] for choice in choices)

    def _expand(self, word: str) -> list[str]:
        starts, at = [""], 0
        for variable in _VARIABLE.finditer(word):
            values = list(self._values.get(variable[1] or variable[2], []))
            if variable[3]:
                values.append(variable[3])
            between = word[at : variable.start()]
            at = variable.end()
            starts = [
                start + between + value for start in starts for value in values or [variable[0]]
            ]
            starts = [start for start in starts[:_VALUES_MAX] if len(start) <= _WORD_MAX]
        return [start + word[at:] for start in starts] or [word]


def _commands(text: str) -> Iterator[list[str]]:
    words: list[str] = []
    skipped = False
    for token in _TOKEN.finditer(text):
        if token["word"] is not None:
            if not skipped:
                words.append(_QUOTED.sub(_unquoted, token["word"]))
            skipped = False
        elif token["redirection"] is not None:
            skipped = token["redirection"].strip() != "<"  # `bash < file` executes it
        elif token["end"] is not None:
            if words:
                yield words
            words, skipped = [], False
    if words:
        yield words


def _unquoted(quoted: re.Match[str]) -> str:
    if quoted[2] is not None:
        return re.sub(r'\\([$`"\\])', r"\1", quoted[2])
    return quoted[1] or quoted[3] or ""


def _texts(command: tuple[str, ...]) -> Iterator[str]:
    """Yield the words of a command that are commands themselves."""
    if command[0] == "eval":
        yield " ".join(command[1:])
    elif command[0] == "trap" and len(command) > 1:
        yield command[1]
    for at, word in enumerate(command[:-1]):
        if word.rpartition("/")[2] in SHELLS:
            for option, text in zip(command[at + 1 :], command[at + 2 :], strict=False):
                if option.startswith("-") and not option.startswith("--") and option[-1] == "c":
                    yield text
