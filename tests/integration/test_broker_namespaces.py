"""An unprivileged broker takes namespaces of its own only where they are of use to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sbx.isolation.broker.server import _in_child

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import os
from sbx.isolation.broker.server import _enter_own_namespaces, _in_child
before = os.stat("/proc/self/ns/user").st_ino
uid, gid = os.geteuid(), os.getegid()
print(_in_child(lambda: _enter_own_namespaces(uid, gid)))
print(os.stat("/proc/self/ns/user").st_ino == before)
"""


def probe(*words: str) -> list[str]:
    done = subprocess.run(
        [*words, sys.executable, "-c", PROBE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.split()


@pytest.mark.core
@pytest.mark.unprivileged
def test_namespaces_are_tried_in_a_child_and_change_nothing_here() -> None:
    assert probe() == ["True", "True"]


def test_a_host_that_allows_none_is_seen_before_the_broker_is_stuck_in_one() -> None:
    """A user namespace of the test's own stands for such a host."""
    deny = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", deny, "sh"]
    assert probe(*words) == ["False", "True"]


def test_a_trial_that_raises_is_no_success() -> None:
    def fail() -> None:
        raise OSError

    assert not _in_child(fail)
    assert _in_child(os.getpid)
