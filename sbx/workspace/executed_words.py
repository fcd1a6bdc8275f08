"""Find the words of a hook, of its configuration or of `.envrc` that name code to execute. Pure.

The rule for a simple command of a shell script, and its kind of mention:

    program    the first word, and the word after `run` and `exec`, if it has a slash
    script     the first argument of an interpreter (`python scripts/check.py`) or of `source`
    option     an argument of an option of the interpreter: `node --require ./hook.js`
    module     the argument of `python -m`; "" for `python -c`
    directory  an entry of a PATH that the script sets, an argument of `PATH_add`
    path       a word of `.envrc` that names an existing file or directory, or has a slash
    word       any other word: it counts if it names an executable file
    code       a word of a program in another language: like `word`, or a script file by its ending

Arguments of other commands do not count: `pytest tests`, `ruff check src/a.py`, `npm test`. They
are the project's own code and data. `host_executable_aliases` looks at the files that exist.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from sbx.workspace.shell_commands import SHELLS, ShellScript, read_script

Kind = Literal[
    "program", "script", "option", "module", "imports", "directory", "path", "word", "code"
]
_INTERPRETER = re.compile(
    r"(?:python[0-9.]*|pypy[0-9.]*|node|nodejs|deno|bun|tsx|ts-node|ruby|perl|php|lua[0-9.]*"
    rf"|Rscript|pwsh|tclsh|g?awk|sed|{'|'.join(sorted(SHELLS))})"
)
_SOURCES = frozenset((".", "source"))
# Options of interpreters that take the next word as their argument.
_WITH_ARGUMENT = {
    "python": ("-W", "-X", "--check-hash-based-pycs"),
    "pypy": ("-W", "-X"),
    "node": ("-r", "--require", "--import", "--loader", "--env-file", "-C", "--conditions"),
    "ruby": ("-r", "-I", "-C", "-E"),
    "perl": ("-I", "-M"),
    "sh": ("-o", "+o", "-O", "+O", "--rcfile", "--init-file"),
    "": ("-r", "-f", "-I", "-d", "-c"),
}
_WITH_CODE = frozenset(("-c", "-e", "-E", "-p", "--eval", "--print"))
_RUNNERS = frozenset(("run", "exec"))
_WRAPPERS = frozenset(
    ("exec", "command", "builtin", "env", "nice", "nohup", "sudo", "time", "timeout", "xargs")
)
_CODE_WORD = re.compile(r"[^\s\"'`!;&|()=,<>\[\]{}]+")
# Of YAML, TOML and JSON.
_KEY = re.compile(
    r"""["']?\b(entry|run|runner|args|rc|source_dir|source_dir_local|extends"""
    r"""|additional_dependencies)["']?[ \t]*[:=][ \t]*"""
)
_SCALAR = re.compile(r"""\"{3}(.*?)\"{3}|'{3}(.*?)'{3}|"((?:\\.|[^"\\])*+)"|'([^']*)'""", re.DOTALL)

# Each argument of these commands names a directory or a file that direnv obeys, even a new one.
_COMMANDS = frozenset(
    (
        "PATH_add", "path_add", "load_prefix", "expand_path", "source_env",
        "source_env_if_exists", "source", ".", "dotenv", "dotenv_if_exists", "env_file",
    )
)  # fmt: skip
_VARIABLES = frozenset(("PATH", "VIRTUAL_ENV", "direnv_layout_dir", "BASH_ENV", "ENV"))
# Below `.direnv`, which is protected by its name: layout go, perl, python, pyenv, ruby.
_LAYOUTS = {
    "node": ("node_modules/.bin",),
    "php": ("vendor/bin",),
    "go": ("bin",),  # before direnv 2.22
    "anaconda": ("environment.yml",),  # its packages are installed on entering the directory
    "pipenv": ("Pipfile", "Pipfile.lock"),
    "poetry": ("poetry.toml",),
}
_USES = {
    "nodenv": ("node_modules/.bin",),
    "nix": ("shell.nix", "default.nix"),
    "flake": ("flake.nix", "flake.lock"),
    "guix": ("guix.scm", "manifest.scm"),
    "devenv": ("devenv.nix", "devenv.yaml", "devenv.lock"),
    "vim": (".vimrc.local",),
}
_PART = re.compile(r"[^\s\"'!;&|()=:]+")
_DIRENV = re.compile(r"\$\(\s*direnv_layout_dir\s*\)")


class Mention(NamedTuple):
    kind: Kind
    word: str


def script_mentions(text: str) -> tuple[list[Mention], list[str]]:
    """Return the mentions of a hook, or of a script that a hook executes, and the directories that
    it changes to."""
    interpreter = _interpreter(text.partition("\n")[0])
    if interpreter not in SHELLS:
        return [Mention("code", word) for word in _CODE_WORD.findall(text)], []
    script = read_script(text)
    changes = [command[-1] for command in script.commands if command[0] in ("cd", "pushd")]
    # husky puts node_modules/.bin on PATH, for `npm test` and the like.
    mentions = [
        mention
        for mention in command_mentions(script)
        if mention.kind != "directory" or "node_modules" not in mention.word
    ]
    return mentions, [change for change in changes if "$" not in change]


def _interpreter(line: str) -> str:
    """Return the interpreter that the first line names, or sh: git and husky use it by default."""
    words = line.removeprefix("#!").split()
    if not line.startswith("#!") or not words:
        return "sh"
    if words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0].rpartition("/")[2] if words else "sh"


def command_mentions(script: ShellScript) -> Iterator[Mention]:
    for name, value in script.assignments:
        if name == "PATH":
            yield from (Mention("directory", part) for part in value.split(":"))
    for command in script.commands:
        yield from _of_command(command)


def hook_configuration_mentions(text: str) -> Iterator[Mention]:
    """Return the mentions of a configuration of pre-commit or lefthook.

    Search for keys instead of parsing: YAML, TOML and JSON need three parsers, and one of them
    takes 10 ms for a usual file. It does no harm to read more text than the value.
    """
    for key in _KEY.finditer(text):
        before = text[text.rfind("\n", 0, key.start()) + 1 : key.start()]
        if "#" in before:
            continue
        value = _value(text, key.end(), before)
        words = _CODE_WORD.findall(value)
        if key[1] in ("entry", "run", "runner"):
            yield from command_mentions(read_script(value))
            yield from (Mention("word", word) for word in words)
        elif key[1] == "args":
            yield from (Mention("code", word) for word in words)
        elif key[1] == "additional_dependencies":
            yield from (Mention("path", word) for word in words if word.startswith("."))
        else:
            yield from (Mention("path", word) for word in words)


def _value(text: str, at: int, before: str) -> str:
    """Return the value at offset `at` of a configuration; `before` is the line up to its key."""
    if scalar := _SCALAR.match(text, at):
        value = next(group for group in scalar.groups() if group is not None)
        return value.replace('\\"', '"').replace("\\n", "\n") if scalar[3] else value
    indent = " " * len(before)
    deeper = re.compile(rf"[^\n]*+(?:\n(?:[ \t]*+(?=\n)|{indent}[ \t-][^\n]*+))*+")
    if before.strip(" \t-"):  # in the middle of a line: { run: x, … }
        deeper = re.compile(r"\[[^\]]*+\]|[^\n,}]*+")
    match = deeper.match(text, at)
    value = match[0] if match is not None else ""
    if value.startswith("|"):
        return value.partition("\n")[2]
    return value.removeprefix(">").lstrip("+-").replace("\n", " ")


def _of_command(command: tuple[str, ...]) -> Iterator[Mention]:
    at = _first(command)
    for number, word in enumerate(command):
        name = word.rpartition("/")[2]
        if number == at or (number > 0 and command[number - 1] in _RUNNERS):
            yield Mention("program", word)
        else:
            yield Mention("word", word)
        if word in _SOURCES and number == at and number + 1 < len(command):
            yield Mention("script", command[number + 1])
        elif _INTERPRETER.fullmatch(name):
            yield from _of_interpreter(name, command[number + 1 :])


def _first(command: tuple[str, ...]) -> int:
    """Return the index of the program that a command executes, after `exec` and the like."""
    at = 0
    while at < len(command) - 1 and command[at] in _WRAPPERS:
        at += 1
        while at < len(command) - 1 and re.match(r"-|[0-9]|[A-Za-z_]\w*=", command[at]):
            at += 1
    return at


def _of_interpreter(name: str, arguments: tuple[str, ...]) -> Iterator[Mention]:
    kind = "sh" if name in SHELLS else name.rstrip("0123456789.").replace("nodejs", "node")
    with_argument = _WITH_ARGUMENT.get(kind, _WITH_ARGUMENT[""])
    option = ""
    if kind in ("awk", "gawk", "sed"):  # their first argument is a program
        for option, word in itertools.pairwise(arguments):
            if option in ("-f", "--file"):
                yield Mention("option", word)
        return
    for word in arguments:
        if kind == "sh" and not option.startswith("--") and option.endswith("c"):
            return  # read_script has read these commands
        if kind != "sh" and option in _WITH_CODE:
            yield from (Mention("code", part) for part in _CODE_WORD.findall(word))
            if kind in ("python", "pypy"):
                yield Mention("module", "")  # it imports from the working directory too
            return
        if option == "-m" and kind in ("python", "pypy"):
            yield Mention("module", word)
            return
        if option in with_argument or (kind == "sh" and re.fullmatch("[-+][a-z]*o", option)):
            yield Mention("option", word)
            option = ""
        elif word.startswith("-m") and word != "-m" and kind in ("python", "pypy"):
            yield Mention("module", word[2:])
            return
        elif word.startswith(("-", "+")) and word != "-":
            option = word
            if "=" in word:
                yield Mention("option", word.partition("=")[2])
        elif kind in ("deno", "bun") and word in _RUNNERS:
            option = ""
        else:
            yield Mention("script", word)
            return


def envrc_mentions(text: str) -> tuple[list[Mention], list[str]]:
    """Return the mentions of an `.envrc`, and the files that it sources: direnv-stdlib(1).

    The user allows the text of `.envrc`. The directories and files that it names are not part of
    that.
    """
    script = read_script(_DIRENV.sub(".direnv", text))
    mentions = [*command_mentions(script), *_of_words(script)]
    sourced: list[str] = []
    for command in script.commands:
        name, arguments = command[0], command[1:]
        if name == "path_add" and arguments[:1] == ("PYTHONPATH",):
            mentions += [Mention("imports", word) for word in arguments[1:]]
            continue
        if name in _COMMANDS:
            mentions += [Mention("directory", word) for word in arguments]
        if name in ("source_env", "source_env_if_exists", "source", "."):
            sourced += arguments
        elif name.startswith("dotenv"):
            mentions += [Mention("directory", f"{word}/.env") for word in arguments]
            mentions.append(Mention("directory", ".env"))
        elif name.startswith(("layout", "use")):
            kind = name.partition("_")[2] or next(iter(arguments), "")
            table = _LAYOUTS if name.startswith("layout") else _USES
            mentions += [Mention("directory", path) for path in table.get(kind, ())]
    return mentions, sourced


def _of_words(script: ShellScript) -> Iterator[Mention]:
    for name, value in script.assignments:
        # In PYTHONPATH only modules that shadow those of Python count: users edit code in `src`.
        kind: Kind = "imports" if name == "PYTHONPATH" else "path"
        for part in value.split(":"):
            yield Mention("directory" if name in _VARIABLES else kind, part)
    for command in script.commands:
        if command[:2] == ("path_add", "PYTHONPATH"):
            continue
        for word in command:
            yield from (Mention("path", part) for part in _PART.findall(word))
