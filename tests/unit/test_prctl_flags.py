"""Flags that a process sets on itself, read back."""

import errno
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    start = f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\nfrom sbx.linux import prctl\n"
    argv = [sys.executable, "-IS", "-c", start + code]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def test_no_new_privs_is_off_until_set() -> None:
    code = "print(prctl.no_new_privs()); prctl.set_no_new_privs(); print(prctl.no_new_privs())"
    assert run(code).split() == ["False", "True"]


def test_process_that_is_not_dumpable_belongs_to_root() -> None:
    code = (
        "prctl.set_dumpable({})\n"
        "print([l for l in open('/proc/self/status') if l.startswith('CoreDumping')] and"
        " prctl.prctl(3))"
    )
    assert run(code.format(False)) == "0"
    assert run(code.format(True)) == "1"


def test_orphan_becomes_the_child_of_a_subreaper() -> None:
    code = (
        "prctl.set_child_subreaper(True)\n"
        "r, w = os.pipe()\n"
        "if not os.fork():\n"
        "    if not os.fork():\n"
        "        os.close(r)\n"
        "        os._exit(7)\n"
        "    os._exit(0)\n"
        "os.close(w); os.read(r, 1)\n"
        "print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)))"
    )
    assert run(code) == "[0, 7]"


def test_death_of_the_parent_sends_the_signal() -> None:
    code = (
        "import signal\n"
        "r, w = os.pipe()\n"
        "ready, go = os.pipe()\n"
        "if not os.fork():\n"
        "    if not os.fork():\n"
        "        prctl.set_parent_death_signal(signal.SIGKILL)\n"
        "        os.close(r); os.close(ready); os.write(go, b'x')\n"
        "        signal.pause()\n"
        "    os.read(ready, 1)\n"
        "    os._exit(0)\n"
        "os.close(w)\n"
        "print(os.read(r, 1))"  # the end of file comes when the grandchild is gone
    )
    assert run(code) == "b''"


def test_option_that_linux_does_not_know_is_an_error() -> None:
    code = "\ntry:\n    prctl.prctl(99999)\nexcept OSError as error:\n    print(error.errno)"
    assert run(code) == str(errno.EINVAL)
