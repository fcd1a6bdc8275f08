"""What needs no privilege: refusals that name the call, and the scheduling policy."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sbx.linux import mounts, namespaces

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("open_tree", lambda: mounts.open_tree("/nowhere/at/all")),
        ("mount_setattr", lambda: mounts.restrict_tree(-1, read_only=True)),
        ("move_mount", lambda: mounts.attach(-1, -1)),
        ("setns", lambda: namespaces.join(-1, namespaces.Namespace.UTS)),
    ],
)
def test_a_refusal_names_the_call(name: str, call: Callable[[], object]) -> None:
    """EPERM, or what is wrong with the arguments: that depends on who runs the tests."""
    with pytest.raises(OSError, match=f"^\\[Errno \\d+\\] {name}: "):
        call()


def test_a_process_works_ahead_and_comes_back_and_its_children_inherit_that() -> None:
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from sbx.linux import scheduling\n"
        "for change in (lambda: None, scheduling.batch, scheduling.normal):\n"
        "    change()\n"
        "    if not os.fork():\n"
        "        os._exit(os.sched_getscheduler(0))\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    argv = [sys.executable, "-IS", "-c", code]
    answer = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert answer.split() == [str(os.SCHED_OTHER), str(os.SCHED_BATCH), str(os.SCHED_OTHER)]
