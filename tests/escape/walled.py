"""Try a piece of code in a process of its own, behind the walls one asks for.

An outcome is one word: `ok`, the name of an errno, or of the signal that ended the process. An
attack proves a wall only if it goes otherwise without that wall: see `refused_only_by`.
"""

import errno
import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sbx.isolation.seccomp import load_filter
from sbx.isolation.seccomp.compiler import number_of

ROOT = Path(__file__).resolve().parents[2]

# Small and quick to start: it runs some hundred times. What it needs to know comes as one literal,
# and each variant ends with its errno as exit status.
_CHILD = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
from sbx.linux import capabilities, landlock, libc, prctl, seccomp
numbers, programs, variants, before, code = eval(sys.argv[2])

def call(name, *args):
    return libc.syscall(name, numbers[name], *args)

def install(name, **options):
    seccomp.install(programs[name], **options)

def behind(filters):
    os.setsid()  # vhangup and TIOCSTI, where nothing stops them, find no terminal
    names = dict(globals())
    exec(before, names)
    prctl.set_no_new_privs()
    for name in filters:
        install(name)
    try:
        exec(code, names)
    except OSError as error:
        return error.errno
    return 0

for filters in variants:
    child = os.fork()
    if not child:
        status = 255
        try:
            status = behind(filters)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def attempt(
    code: str,
    *filters: str,
    before: str = "",
    directory: Path | None = None,
    packages: bool = False,
) -> str:
    """How `code` ends behind `filters`; `before` runs first, before any of them.

    Both may use os, ctypes, sbx.linux, `install(name of a filter)`, `call(name of a linux call, …)`
    with the name in quotes, and with `packages` what is installed beside this Python.
    """
    return _outcomes(code, [filters], before, directory, packages)[0]


def refused_only_by(
    filters: tuple[str, ...], code: str, answer: str, directory: Path | None = None
) -> None:
    """Assert that `code` gets `answer` behind `filters`, and not without the last of them."""
    behind, without = _outcomes(code, [filters, filters[:-1]], "", directory, packages=False)
    assert behind == answer
    if without == answer:
        pytest.skip(f"cannot be told apart here: {answer} without the filter as well")


def _outcomes(
    code: str,
    variants: list[tuple[str, ...]],
    before: str,
    directory: Path | None,
    packages: bool,
) -> list[str]:
    calls = set(re.findall(r'\bcall\("(\w+)"', before + code))
    numbers = {name: _number(name) for name in calls}
    if missing := [name for name, number in numbers.items() if number is None]:
        pytest.skip(f"no {missing} on this architecture")
    reported = repr((numbers, _programs(), variants, before, code))
    done = subprocess.run(
        [sys.executable, "-I" if packages else "-IS", "-c", _CHILD, str(ROOT), reported],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    statuses = [int(line) for line in done.stdout.split()]
    assert 255 not in statuses, done.stderr
    return [_word(status) for status in statuses]


def _word(status: int) -> str:
    if status < 0:
        return signal.Signals(-status).name
    return errno.errorcode[status] if status else "ok"


@functools.cache
def _programs() -> dict[str, bytes]:
    machine = os.uname().machine
    return {
        name: load_filter(name, machine).program
        for name in ("default", "strict", "allowlist", "last", "no_unix")
    }


@functools.cache
def _number(name: str) -> int | None:
    return number_of(name, os.uname().machine)
