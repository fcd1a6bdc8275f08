"""Run commands as a user who has nothing: no entry in /etc/passwd, no group, no cgroup, no home.

Root is needed to become that user, and to let it reach what root keeps to itself: a checkout or an
interpreter below a home of mode 0700 (pyenv, uv). In a mount namespace of the child's own, each
directory that the user could not pass is covered by a tmpfs that it can, and on that what is needed
is bound at its old path again: so a virtual environment, whose paths are fixed, works unchanged.
The host's own view does not change, and all of it ends with the child.

CI is not handed on: what such a user lacks (cgroups, above all) is no fault of the host, and the
tests that need it are skipped with their reason.

The project is copied, so that files of root's umask are in nobody's way; its bytecode as well,
which that user could write nowhere.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

UID = 64_123
_PROJECT = Path(__file__).resolve().parents[2]
_COPIED = ("sbx", "policies", "scripts", "tests", "docs", "pyproject.toml")

# $1 is where the binds wait; then pairs of a covered directory and what is shown below it, "--",
# and the command.
_ENTER = r"""
set -e
waiting=$1; shift
mount --make-rprivate /
number=0
while [ "$1" != -- ]; do
    number=$((number + 1))
    mkdir -p "$waiting/$number"
    mount --rbind "$2" "$waiting/$number"
    printf '%s\n' "$1" >> "$waiting/covered"
    printf '%s %s\n' "$number" "$2" >> "$waiting/shown"
    shift 2
done
shift
if [ -e "$waiting/covered" ]; then
    sort -u "$waiting/covered" | while read -r directory; do
        mount -t tmpfs -o mode=0755 tmpfs "$directory"
    done
    while read -r number path; do
        mkdir -p "$path"
        mount --rbind "$waiting/$number" "$path"
    done < "$waiting/shown"
fi
exec "$@"
"""


def copy_of_the_project(top: Path) -> Path:
    """A copy that everybody may read, below `top`, which everybody must be able to pass."""
    copy = top / "project"
    copy.mkdir()
    for name in _COPIED:
        source = _PROJECT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns(".*"))
        else:
            shutil.copy(source, copy / name)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return copy


def run(
    command: Sequence[str], *, top: Path, cwd: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `command` as that user; its home and its TMPDIR are new directories below `top`."""
    words, environment = as_user(command, top)
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def as_user(command: Sequence[str], top: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words that run `command` as that user, and its environment. See `run`."""
    home, temporary = top / "home", top / "tmp"
    waiting = tempfile.mkdtemp(dir=top)
    for directory in (home, temporary):
        directory.mkdir(exist_ok=True)
        os.chown(directory, UID, UID)
    pairs = [word for pair in _to_be_shown() for word in pair]
    become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"]
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "LANG": "C.UTF-8",
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    enter = ["unshare", "--mount", "sh", "-c", _ENTER, "sh", waiting, *pairs, "--"]
    return [*enter, *become, *command], environment


def _to_be_shown() -> list[tuple[str, str]]:
    """(the directory that would stop the user, what lies below it) for each part of this Python."""
    needed = _outermost(
        {Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parent}
    )
    return [(str(shut), str(path)) for path in needed if (shut := _shut(path)) is not None]


def _outermost(paths: Iterable[Path]) -> list[Path]:
    found = set(paths)
    return sorted(
        one
        for one in found
        if not any(one != other and one.is_relative_to(other) for other in found)
    )


def _shut(path: Path) -> Path | None:
    """The first directory on the way to `path` that others may not pass."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None
