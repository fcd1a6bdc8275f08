"""Notes that sbx adds to the standard error of a run, by the words in its output.

A program inside does not know that a sandbox is the cause of its error. The output is hostile: a
note never repeats a part of it, or a path of the host.
"""

import re

NO_NETWORK = (
    "note: this sandbox has no network, so packages cannot be downloaded. A policy with extends ="
    ' "networked" and the host of the package index in network.allow permits it; or name an'
    " environment of sbx env create in the policy\n"
)
NO_REPOSITORY = (
    "note: the git repository of this directory is outside of it, and the sandbox does not see it."
    " Use the whole repository, or a clone, as the workspace\n"
)
NO_INTERPRETER = (
    "note: the first line of a program in a virtual environment names the Python of the host, by a"
    " path that the sandbox does not have: run it as .venv/bin/python -m NAME. If that Python is"
    " missing too, name an environment of sbx env create in the policy\n"
)
# The words of pip, uv, npm, pnpm, yarn, conda and poetry if they cannot reach a package index.
_INDEX_NOT_REACHED = re.compile(
    r"ERROR: (Could not find a version that satisfies|No matching distribution found for)"
    r"|WARNING: Retrying \(Retry\(|error: (Request failed|Failed to (fetch|download))"
    r"|(npm|pnpm|yarn|corepack)\b.*\b(EAI_AGAIN|ENOTFOUND|ECONNREFUSED|ENETUNREACH)\b"
    r"|(EAI_AGAIN|ENOTFOUND|ECONNREFUSED|ENETUNREACH)\b.*\bregistry\."
    r"|CondaHTTPError|All attempts to connect to \S+ failed"
)
_REPOSITORY_NOT_REACHED = re.compile(
    r"^fatal: not a git repository|^error: unable to normalize alternate object path", re.MULTILINE
)
# The words of bash, dash, zsh, env and Python. A file of the system is not meant: no `/` precedes.
_PROGRAM = r"(?<![\w./-])(/workspace/|/uploads/|\./)?\.?\w[\w.-]{0,99}/bin/[\w.-]{1,99}"
_INTERPRETER_NOT_REACHED = re.compile(
    rf"{_PROGRAM}: (cannot execute: required file not found|not found$|\S+: bad interpreter)"
    rf"|no such file or directory: {_PROGRAM}$"
    rf"|No such file or directory: '{_PROGRAM}'"
    rf"|\u2018{_PROGRAM}\u2019: No such file or directory",
    re.MULTILINE,
)


def lacks_network(output: str) -> bool:
    """Return whether an installer of packages printed that it reaches no package index."""
    return _INDEX_NOT_REACHED.search(output) is not None


def lacks_repository(output: str) -> bool:
    """Return whether git printed that it finds no repository, or not all objects of one."""
    return _REPOSITORY_NOT_REACHED.search(output) is not None


def lacks_interpreter(output: str) -> bool:
    """Return whether a program in a `bin` of the workspace was not found, or its interpreter."""
    return "/bin/" in output and _INTERPRETER_NOT_REACHED.search(output) is not None
