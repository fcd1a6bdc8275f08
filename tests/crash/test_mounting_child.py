"""The child that mounts into a jail: killed, hung or failing, it is told of and leaves nothing."""

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sbx.errors import Broken
from sbx.isolation.broker import live_mounts
from sbx.linux import mounts, namespaces
from tests.unit.in_child import exit_status, in_child


def outcome(act: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is told of a child that does this where it would join the jail."""
    monkeypatch.setattr(namespaces, "join", act)
    fd = os.open("/", os.O_PATH)
    try:
        child = live_mounts.begin(fd, "/mnt/x", fd, attach=True)
        error = live_mounts.end(child, "/mnt/x").error
    finally:
        os.close(fd)
    assert error is not None
    assert error.code == "mount_failed"
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    return error.message


def test_a_child_that_is_killed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said = outcome(lambda *_: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    assert said.endswith("it was ended by signal 9")


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_mounts, "DEADLINE_S", 0.2)
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


@pytest.mark.parametrize(
    ("code", "answer"), [(1, "already_mounted"), (2, "target_moved"), (3, "sockets_not_masked")]
)
def test_refusals_of_a_child_have_codes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, code: int, answer: str
) -> None:
    def refuse(*_: object) -> None:
        raise live_mounts._Refused(code)

    monkeypatch.setattr(namespaces, "join", refuse)
    fd = os.open("/", os.O_PATH)
    child = live_mounts.begin(fd, "/mnt/x", fd, attach=True)
    os.close(fd)
    error = live_mounts.end(child, "/mnt/x").error
    assert error is not None
    assert (error.code, "/mnt/x" in error.message) == (answer, True)


def test_a_child_whose_broker_has_ended_does_nothing(tmp_path: Path) -> None:
    def act() -> None:
        one, _ = socket.socketpair()
        live_mounts._act(lambda report: (tmp_path / "done").touch(), one, parent=1)

    assert exit_status(act) == live_mounts._FAILED
    assert not (tmp_path / "done").exists()


def test_a_child_that_cannot_be_held_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def out_of_files(pid: int) -> None:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", out_of_files)
    monkeypatch.setattr(namespaces, "join", lambda *_: time.sleep(600))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many open files"):
        live_mounts.begin_masks(0, [])
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.needs("root")
def test_a_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotADirectoryError):
        live_mounts.open_source(str(tmp_path / "file"), None, read_only=True)
    with pytest.raises(Broken) as raised:
        live_mounts.open_source(str(tmp_path), [1, 1], read_only=True)
    assert raised.value.code == "path_replaced"
    assert len(os.listdir("/proc/self/fd")) == before


# -- places, in a mount namespace of a child -------------------------------------------------------


def attached_twice(tmp_path: Path) -> str:
    """Put one tree at a place, then another one, and take the first away; the outcomes."""
    source, place = tmp_path / "source", tmp_path / "place"
    for directory in (source, place / "name"):
        directory.mkdir(parents=True)
    (source / "file").touch()

    def act(report: int) -> str:
        namespaces.unshare(namespaces.Namespace.MOUNT)
        mounts.private("/")
        root = os.open("/", os.O_PATH)
        outcomes = []
        trees = [live_mounts.open_source(str(source), None, read_only=True) for _ in range(2)]
        at = os.open(place, os.O_PATH)
        for tree in trees:
            try:
                live_mounts._put(root, str(place), at, "name", tree)
                outcomes.append(",".join(os.listdir(place / "name")))
            except live_mounts._Refused as refused:
                outcomes.append(f"refused {refused.args[0]}")
        for _ in range(2):  # the second time it is gone already
            live_mounts._take_away(root, str(place), "name", trees[0])
            outcomes.append(",".join(os.listdir(place / "name")))
        os.rename(place, f"{place}-moved")
        place.mkdir()
        try:
            live_mounts._put(root, str(place), at, "name", trees[1])
        except live_mounts._Refused as refused:
            outcomes.append(f"refused {refused.args[0]}")
        outcomes.append(",".join(os.listdir(f"{place}-moved/name")))
        return " ".join(outcomes)

    return in_child(act)


@pytest.mark.needs("root")
def test_place_takes_one_directory_and_only_where_its_path_leads(tmp_path: Path) -> None:
    assert attached_twice(tmp_path) == "file refused 1   refused 2 "


@pytest.mark.needs("root")
def test_mount_that_linux_does_not_take_away_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: str) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(mounts, "detach", busy)

    def act(report: int) -> None:
        tree = os.open(tmp_path, os.O_PATH)
        live_mounts._take_away(os.open("/", os.O_PATH), "/nowhere", "name", tree)

    assert in_child(act) == "OSError(16, 'busy')"
