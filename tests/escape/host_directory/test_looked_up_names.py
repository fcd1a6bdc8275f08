"""Every name that a common program of the host looks up in an empty directory is in the rules, or
here with the reason why code inside may create it.

strace(1) shows the names, in the directory and above it. A program that finds a name by a list of
the directory does not appear: Python's modules are in `host_executables` by another measurement.
"""

import os
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from planting import USER_PATH, Place, make_place

from sbx.workspace.host_executables import path_rules
from tests.tiers import rows

_GIT = (
    "git status; git log; git branch; git ls-remote .; git init -q; git status; git add -A;"
    " git diff; git stash list; git submodule status; git commit -qm x --allow-empty; git log;"
    " git fetch; git gc"
)
PROGRAMS = {
    "bash": ["bash", "-ic", "cd ."],
    "cargo": ["cargo", "--version"],
    "ctags": ["ctags", "-R", "."],
    "curl": ["curl", "--version"],
    "direnv": ["direnv", "exec", ".", "true"],
    "gdb": ["gdb", "-batch"],
    "git": ["sh", "-c", _GIT],
    "gtags": ["gtags"],
    "json.tool": ["python3", "-m", "json.tool", "--help"],
    "less": ["less", "-V"],
    "make": ["make", "-n"],
    "node": ["node", "-e", "1"],
    "npm": ["npm", "prefix"],
    "npm ls": ["npm", "ls"],
    "pip": ["python3", "-m", "pip", "list"],
    "pre-commit": ["pre-commit", "--version"],
    "python": ["python3", "-i"],
    "ssh": ["ssh", "-V"],
    "tar": ["tar", "cf", "/dev/null", "."],
    "venv": ["python3", "-m", "venv", "--help"],
    "vim": ["vim", "-c", "set exrc", "-es", "-c", "qa!"],
    "vim.tiny": ["vim.tiny", "--not-a-term", "-c", "set exrc", "-c", "qa!"],
    "zsh": ["zsh", "-ic", "cd ."],
}
# Of scripts/test, or of each host: the names of other versions of the rest are for the full tier.
EVERYWHERE = ("bash", "ctags", "direnv", "git", "pre-commit", "python", "tar", "vim.tiny", "zsh")
PROJECT_CODE = "the project's own code: a user who builds or tests it runs it"
LOCK = "names of packages and hashes; npm runs no code of them without an installation"
FREE = {
    ".gitattributes": "names only drivers of the repository; in the rules if it has a driver",
    ".mailmap": "names of people",
    "GNUmakefile": PROJECT_CODE,
    "Makefile": PROJECT_CODE,
    "makefile": PROJECT_CODE,
    "RCS": f"make takes Makefile from it; {PROJECT_CODE}",
    "SCCS": f"make takes Makefile from it; {PROJECT_CODE}",
    "node_modules": PROJECT_CODE,
    "node_modules/*": PROJECT_CODE,
    "package.json": PROJECT_CODE,
    "package-lock.json": LOCK,
    "npm-shrinkwrap.json": LOCK,
    "yarn.lock": LOCK,
    "gtags.files": "a list of files to index",
    "GTAGS": "the index that gtags writes",
    "GRTAGS": "the index that gtags writes",
    "GPATH": "the index that gtags writes",
    "tags": "the index that ctags writes",
}
_PATH = re.compile(
    r'(?:(?:AT_FDCWD|\d+)<(?P<base>[^>]*)>, )?"(?P<path>(?:[^"\\]|\\.)*)".* = -1 ENOENT'
)


def looked_up(trace: str, directory: Path, top: Path) -> set[str]:
    """Return the missing names of a trace, each relative to the directory or to one above it."""
    names = set()
    for line in trace.splitlines():
        if (match := _PATH.search(line)) is not None:
            path = os.path.normpath(os.path.join(directory, match["base"] or "", match["path"]))
            for base in (directory, *directory.parents):
                is_below = path.startswith(f"{base}/") and path != str(directory)
                if is_below and base.is_relative_to(top):
                    names.add(path.removeprefix(f"{base}/"))
                    break
    return {name for name in names if not name.startswith("home/")}


def is_in_the_rules(name: str) -> bool:
    rules, parts = path_rules(), name.split("/")
    depths = range(1, len(parts) + 1)
    return any(rules.match(parts[:depth], lambda _: False) is not None for depth in depths)


@pytest.fixture
def place(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Place:
    return make_place(own_temporary_directory / f"names-{abs(hash(request.node.name))}")


@pytest.mark.parametrize("program", rows(PROGRAMS, EVERYWHERE))
def test_program_looks_up_no_free_name(place: Place, program: str) -> None:
    argv = PROGRAMS[program]
    for needed in ("strace", argv[0]):
        if shutil.which(needed, path=USER_PATH) is None:
            pytest.skip(f"{needed} is not installed")
    place.write("deep/empty/.keep", "")
    place.write("../home/trace", "")
    (place.directory / "deep/empty/.keep").unlink()
    trace = place.directory.parent / "home/trace"
    tracing = ("strace", "-f", "-y", "--seccomp-bpf", "-e", "trace=%file", "-o", str(trace))
    done = place.user(*tracing, *argv, cwd="deep/empty")
    text = trace.read_text(errors="replace")
    assert text, done.stderr
    names = looked_up(text, place.directory / "deep/empty", place.directory)
    free = {name for name in names if not is_in_the_rules(name)}
    print(f"{program}: {len(names)} names, free: {sorted(free)}")
    assert {name for name in free if not any(fnmatchcase(name, known) for known in FREE)} == set()


def test_lookups_of_a_trace_are_found() -> None:
    """The control: a program that looks up a free name here, below, and above would fail."""
    trace = """
        7 openat(AT_FDCWD</t/a/b>, "free.toml", O_RDONLY) = -1 ENOENT (No such file or directory)
        7 stat("/t/a/above.toml", 0x7ff) = -1 ENOENT (No such file or directory)
        7 openat(3</t/a/b/sub>, ".envrc", O_RDONLY) = -1 ENOENT (No such file or directory)
        7 stat("there", {st_mode=S_IFREG}) = 0
        7 stat("/etc/x", 0x7ff) = -1 ENOENT (No such file or directory)
    """
    names = looked_up(trace, Path("/t/a/b"), Path("/t"))
    assert names == {"free.toml", "above.toml", "sub/.envrc"}
    assert {name for name in names if is_in_the_rules(name)} == {"sub/.envrc"}
