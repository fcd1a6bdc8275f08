"""The child that mounts into a jail: killed, hung or failing, it is told of and leaves nothing."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from sbx.isolation import attaching
from sbx.linux import namespaces


def outcome(act: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is told of a child that does this where it would join the jail."""
    monkeypatch.setattr(namespaces, "join", act)
    fd = os.open("/", os.O_PATH)
    try:
        child = attaching.begin(fd, "/mnt/x", fd, attach=True)
        error = attaching.end(child, "/mnt/x").error
    finally:
        os.close(fd)
    assert error is not None
    assert error.code == "attach_failed"
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    return error.message


def test_a_child_that_is_killed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said = outcome(lambda *_: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    assert said.endswith("it was ended by signal 9")


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "DEADLINE_S", 0.2)
    said = outcome(lambda *_: time.sleep(600), monkeypatch)
    assert said.endswith("it was ended by signal 14")


def test_a_child_that_may_not_join_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "setns: Operation not permitted")

    assert outcome(refused, monkeypatch).endswith("setns: Operation not permitted")


def test_a_child_imports_nothing_once_it_would_be_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it found there would be a file of the jail, run with the broker's rights."""

    def import_something(*_: object) -> None:
        import antigravity  # noqa: F401  # opens a browser, should it ever be found

    assert outcome(import_something, monkeypatch).endswith(": ImportError")


def test_an_unforeseen_failure_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(lambda *_: dict[str, int]()["x"], monkeypatch).endswith(": KeyError")
