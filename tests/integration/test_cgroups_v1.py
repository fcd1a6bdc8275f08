"""What only cgroup v1 has: a tree for each controller."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.isolation.cgroups import CgroupCapabilities, CgroupLimits, IoLimit, open_hierarchy, probe
from sbx.isolation.cgroups.v1 import V1Hierarchy, V1Jail


@pytest.fixture
def capabilities() -> CgroupCapabilities:
    capabilities = probe()
    if capabilities.version != 1 or not capabilities.controllers:
        pytest.skip(f"no cgroup v1 to write: {capabilities}")
    return capabilities


@pytest.fixture
def hierarchy(capabilities: CgroupCapabilities) -> Iterator[V1Hierarchy]:
    hierarchy = open_hierarchy(capabilities, "test")
    assert isinstance(hierarchy, V1Hierarchy)
    yield hierarchy
    hierarchy.close(10)


def own_groups() -> str:
    return Path("/proc/self/cgroup").read_text()


def in_child(jail: V1Jail) -> tuple[str, str]:
    """What `enter` raises in a forked child, and where that child is then."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            try:
                jail.enter()
                outcome = "entered"
            except OSError as error:
                outcome = type(error).__name__
            os.write(writing, f"{outcome}\0{own_groups()}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        outcome, _, where = pipe.read().partition("\0")
    return outcome, where


def test_enter_moves_through_all_trees(hierarchy: V1Hierarchy) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
    outcome, where = in_child(jail)
    assert outcome == "entered"
    assert where.count("/box-a/jail-k\n") == len(jail.directories) >= 3


@pytest.mark.parametrize("tree", ["memory", "tasks", "cpu", "cpuacct"])
def test_enter_is_all_or_none(hierarchy: V1Hierarchy, tree: str) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
    if tree not in jail.trees:
        pytest.skip(f"no {tree} here")
    os.rmdir(jail.trees[tree])
    assert in_child(jail) == ("FileNotFoundError", own_groups())


def test_enter_with_a_second_thread_is_refused(hierarchy: V1Hierarchy) -> None:
    """Moved by its `tasks` file, a process would leave its other threads outside."""
    jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(OSError, match="one thread"):
            jail.enter()
    finally:
        done.set()
        thread.join()
    assert jail.pids() == []


def test_quota_above_an_outer_one_is_taken_as_met(
    hierarchy: V1Hierarchy, capabilities: CgroupCapabilities
) -> None:
    """cgroup v1 answers EINVAL there, where v2 lets the tighter one hold."""
    outer = Path(hierarchy.group.trees["cpu"])
    (outer / "cpu.cfs_quota_us").write_text("50000")
    jail = hierarchy.make_sandbox("a", CgroupLimits(cpu_quota=2.0)).make_jail("k")
    assert jail.limits().cpu_quota == 0.5


def test_jails_without_a_pids_controller_are_killed_too(capabilities: CgroupCapabilities) -> None:
    few = {name: path for name, path in capabilities.controllers.items() if name == "memory"}
    hierarchy = open_hierarchy(capabilities._replace(controllers=few, cpuacct=None), "test")
    try:
        jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        with subprocess.Popen(command, preexec_fn=jail.enter) as process:  # noqa: PLW1509
            jail.kill()
            assert process.wait() == -9
        assert (jail.usage().tasks, jail.limits().tasks_max) == (None, None)
    finally:
        hierarchy.close(10)


def test_killed_jail_cannot_fork_any_more(hierarchy: V1Hierarchy) -> None:
    """What keeps a fork bomb from outrunning the signals, as there is no cgroup.kill."""
    jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
    jail.kill()
    command = [sys.executable, "-I", "-S", "-c", "import os; os.fork()"]
    late = subprocess.run(command, check=False, preexec_fn=jail.enter, stderr=subprocess.DEVNULL)
    assert late.returncode == 1
    assert jail.events().pids_max_hits == 1


def test_direct_writes_are_throttled(hierarchy: V1Hierarchy, tmp_path: Path) -> None:
    """The limit is on the jail: on v1 that of a group does not hold for those below it."""
    if "io" not in hierarchy.capabilities.controllers:
        pytest.skip("no blkio here")
    number = tmp_path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    if not Path(f"/sys/dev/block/{device}/queue").exists():
        pytest.skip(f"{device} is no whole block device")
    io = (IoLimit(device, write_bps=1 << 20),)
    jail = hierarchy.make_sandbox("a", CgroupLimits(io=io)).make_jail("k")
    assert jail.limits().io == io
    command = ["dd", "if=/dev/zero", f"of={tmp_path}/x", "bs=1M", "count=3", "oflag=direct"]
    begin = os.times().elapsed
    subprocess.run(command, preexec_fn=jail.enter, check=True, stderr=subprocess.DEVNULL)
    assert os.times().elapsed - begin > 1
