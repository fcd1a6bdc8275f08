"""The watchdog of a child process."""

import os
import signal
import subprocess
import sys

import pytest

from sbx.isolation.broker import watchdog
from sbx.isolation.broker.watchdog import Watchdog


def test_child_is_killed_though_its_watchdog_has_ended() -> None:
    """A stopped broker of a service that could have killed it stayed, where the watchdog was killed
    for lack of memory."""
    with subprocess.Popen(["sleep", "600"]) as child:
        dog = Watchdog(child)
        dog._process.kill()
        dog._process.wait()
        try:
            watchdog.kill(child, dog)
            assert child.wait(60.0) == -signal.SIGKILL
        finally:
            child.kill()
            dog.close()


def test_child_that_does_not_end_in_time_is_killed() -> None:
    for watched in (False, True):
        with subprocess.Popen(["sleep", "600"]) as child:
            dog = Watchdog(child) if watched else None
            watchdog.end(child, dog, 0.01)
            assert child.returncode == -signal.SIGKILL


def test_watchdog_is_closed_more_than_once_without_an_error() -> None:
    with subprocess.Popen(["true"]) as child:
        dog = Watchdog(child)
        child.wait()
        for _ in range(2):
            dog.close()
    dog.kill()  # as does a kill of what has ended


def test_watchdog_that_cannot_start_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with subprocess.Popen(["sleep", "600"]) as child:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(FileNotFoundError):
            Watchdog(child)
        assert len(os.listdir("/proc/self/fd")) == before
        child.kill()
