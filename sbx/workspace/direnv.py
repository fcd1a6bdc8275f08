"""Find the paths that an `.envrc` adds to PATH, sources or evaluates: direnv-stdlib(1). Pure.

The user allows the text of `.envrc`. The directories and files that it names are not part of that.
"""

import re
from collections.abc import Iterator

from sbx.workspace.executed_words import Kind, Mention, of_commands
from sbx.workspace.shell_commands import ShellScript, read_script

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


def of_envrc(text: str) -> tuple[list[Mention], list[str]]:
    """Return the mentions of an `.envrc`, and the files that it sources."""
    script = read_script(_DIRENV.sub(".direnv", text))
    mentions = [*of_commands(script), *_of_words(script)]
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
