"""When a service may move below the group that systemd gave it, and when not."""

import os
from pathlib import Path

import pytest

from sbx.isolation import cgroups
from sbx.isolation.cgroups import _is_delegated, _only_our_process, groups, move_to_leaf_cgroup
from sbx.isolation.cgroups.probe import CgroupCapabilities


def found(
    group: Path, *, version: int = 2, members: tuple[int, ...] | None = None, at_root: bool = False
) -> CgroupCapabilities:
    return CgroupCapabilities(
        version,
        dict.fromkeys(("memory", "tasks", "cpu"), str(group)),
        {},
        cpuacct=None,
        members=(os.getpid(),) if members is None else members,
        at_root=at_root,
        scope=None,
    )


@pytest.fixture
def delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group of a user's own systemd."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    return tmp_path


def test_a_service_alone_in_its_group_steps_aside(delegated: Path) -> None:
    assert _only_our_process(found(delegated))


def test_nobody_does_who_is_not_alone_or_has_no_group_of_its_own(delegated: Path) -> None:
    assert not _only_our_process(found(delegated, members=(1, os.getpid())))
    assert not _only_our_process(found(delegated, at_root=True))
    assert not _only_our_process(found(delegated, version=1))
    without_cpu = found(delegated)
    del without_cpu.controllers["cpu"]
    assert not _only_our_process(without_cpu)


def test_what_systemd_did_not_delegate_is_left_alone(
    delegated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSTEMD_EXEC_PID", "1")  # of whoever started the program that started us
    assert not _is_delegated(str(delegated))
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # root's own systemd marks what it delegates
    assert not _is_delegated(str(delegated))


def test_step_that_linux_refuses_leaves_no_group(
    delegated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "probe", lambda: found(delegated))
    assert move_to_leaf_cgroup() is None  # a directory has no cgroup.procs to be moved by
    assert os.listdir(delegated) == []


def test_service_that_steps_aside_moves_into_a_leaf(
    delegated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = groups.make

    def make(paths: list[str]) -> None:
        real(paths)
        (Path(paths[-1]) / "cgroup.procs").touch()

    monkeypatch.setattr(groups, "make", make)
    monkeypatch.setattr(cgroups, "probe", lambda: found(delegated))
    leaf = move_to_leaf_cgroup()
    assert leaf == f"{delegated}/{groups.runtime_name('service')}/sup"
    assert (Path(leaf) / "cgroup.procs").read_text() == "0"


def test_service_that_is_not_alone_stays(delegated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "probe", lambda: found(delegated, version=1))
    assert move_to_leaf_cgroup() is None
    assert os.listdir(delegated) == []
