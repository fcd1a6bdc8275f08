"""Group directories: killing and removing where a step fails, in directories of the test."""

import errno
import os
import signal
from pathlib import Path

import pytest

from sbx.isolation.cgroups import groups


def ended_child() -> int:
    """Return the pid of a child that has ended and is not reaped."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_group_that_is_gone_has_no_groups_below(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "file").touch()
    assert groups.below(str(tmp_path)) == [str(tmp_path / "below")]
    assert groups.below(str(tmp_path / "gone")) == []


def test_processes_that_appear_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = iter(range(1 << 23, 1 << 24))  # beyond all that Linux gives
    monkeypatch.setattr(groups, "KILL_PASSES", 5)
    with pytest.raises(OSError, match="faster than they can be killed") as raised:
        groups.kill(lambda: {next(pids)})
    assert raised.value.errno == errno.EBUSY
    assert next(pids) == (1 << 23) + 10  # each pass reads twice


def test_process_that_ends_before_its_signal_is_passed_over() -> None:
    pid = ended_child()
    reads = []

    def members() -> set[int]:
        reads.append(pid)
        if len(reads) == 2:  # it is held by now
            os.waitpid(pid, 0)
        return {pid} if len(reads) < 3 else set()

    groups.kill(members)
    assert len(reads) == 3


def test_process_that_left_the_group_is_not_killed() -> None:
    """Its number may be another process's by then."""
    if (pid := os.fork()) == 0:
        signal.pause()
        os._exit(0)
    try:
        reads = iter([{pid}, set[int](), set[int]()])
        groups.kill(lambda: next(reads))
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_lack_of_descriptors_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real, pid = os.pidfd_open, os.getpid()
    left = [errno.EMFILE, 0]

    def limited(pid: int) -> int:
        if (number := left.pop()) != 0:
            raise OSError(number, os.strerror(number))
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", limited)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files"):
        groups.wait_for_exit([pid, pid], 0)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_group_is_removed_with_all_below_it(tmp_path: Path) -> None:
    (tmp_path / "group/a/b").mkdir(parents=True)
    groups.remove([str(tmp_path / "group"), str(tmp_path / "gone")], lambda _: None, 0)
    assert os.listdir(tmp_path) == []


def test_group_in_use_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "cgroup.procs").write_text("7\n")
    with pytest.raises(TimeoutError, match=r"still in use by \[7\]"):
        groups.remove([str(group)], lambda _: None, 0)
    groups.remove([str(group)], lambda _: (group / "cgroup.procs").unlink(), 60)
    assert not group.exists()


def test_removal_that_linux_refuses_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        groups.remove([str(tmp_path / "file")], lambda _: None, 60)
