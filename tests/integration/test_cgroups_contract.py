"""What both versions promise, with real groups below this process's own one.

Here pytest is the broker. On cgroup v2 that needs it alone in a delegated group: tests/vm/.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbx.isolation.cgroups import CgroupLimits, Hierarchy, JailGroup, open_hierarchy, probe

MIB = 1 << 20
BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
FORKS_UNTIL_REFUSED = """
import os, time
for forks in range(100):
    try:
        if os.fork() == 0: os.close(1); time.sleep(60); os._exit(0)
    except BlockingIOError: break
print(forks)
"""
BURN_A_SECOND = """
import time
cpu, end = time.process_time(), time.monotonic() + 1
while time.monotonic() < end: pass
print(time.process_time() - cpu)
"""


@pytest.fixture
def hierarchy() -> Iterator[Hierarchy]:
    hierarchy = open_hierarchy(probe(), "test")
    if hierarchy.version == 0:
        pytest.skip(f"no cgroups: {hierarchy.capabilities.missing['memory']}")
    yield hierarchy
    hierarchy.close(10)
    assert not ours(hierarchy)


def ours(hierarchy: Hierarchy) -> list[Path]:
    """The runtime groups of this process, in every tree."""
    bases = {Path(base) for base in hierarchy.capabilities.controllers.values()}
    return [path for base in bases for path in base.glob(f"sbx-*-{os.getpid()}-*")]


def start(jail: JailGroup, code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        preexec_fn=jail.enter,  # noqa: PLW1509  the tests have one thread
        stdout=subprocess.PIPE,
        text=True,
    )


def run(jail: JailGroup, code: str) -> tuple[int, str]:
    """Status and output of a Python program in the jail."""
    with start(jail, code) as process:
        output, _ = process.communicate()
    return process.returncode, output


def sleeper(jail: JailGroup) -> "subprocess.Popen[str]":
    return start(jail, "import time; time.sleep(60)")


def ended(process: "subprocess.Popen[str]") -> int:
    process.communicate()
    return process.returncode


def until(condition: Callable[[], bool]) -> None:
    """Polls, for what nothing can be waited on; the time limit of the test ends it."""
    while not condition():
        os.sched_yield()


def test_what_needs_more_memory_is_killed_and_counts_for_its_own_jail(
    hierarchy: Hierarchy,
) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits(memory_max=50 * MIB))
    jail, sibling = sandbox.make_jail("k"), sandbox.make_jail("sibling")
    assert run(jail, f"bytearray({200 * MIB})") == (-9, "")
    assert jail.events().oom_kills > 0
    assert sibling.events().oom_kills == 0
    peak = jail.usage().memory_peak
    assert peak is not None
    # v2 counts what was refused as well
    assert 40 * MIB < peak < 55 * MIB


def test_what_fits_is_left_alone(hierarchy: Hierarchy) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits(memory_max=200 * MIB)).make_jail("k")
    assert run(jail, f"bytearray({50 * MIB})") == (0, "")
    assert jail.events().oom_kills == 0


def test_files_on_tmpfs_count_as_memory(hierarchy: Hierarchy) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits(memory_max=50 * MIB)).make_jail("k")
    file = Path(f"/dev/shm/sbx-test-{os.getpid()}")
    code = f"""
with open({str(file)!r}, "wb") as file:
    for _ in range(100): file.write(bytes({MIB}))
"""
    try:
        assert run(jail, code) == (-9, "")
    finally:
        file.unlink(missing_ok=True)
    assert jail.events().oom_kills > 0


def test_jails_of_a_sandbox_share_its_memory(hierarchy: Hierarchy) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits(memory_max=100 * MIB))
    first, second = sandbox.make_jail("1"), sandbox.make_jail("2")
    holder = start(first, f"held = bytearray({70 * MIB})\nimport time; time.sleep(60)")
    until(lambda: (first.usage().memory or 0) > 70 * MIB)
    run(second, f"bytearray({60 * MIB})")
    # Which of the two dies is for linux to choose; that one jail paid is what counts
    assert first.events().oom_kills + second.events().oom_kills > 0
    holder.kill()
    ended(holder)


def test_the_memory_limit_is_raised_and_returns(hierarchy: Hierarchy) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits(memory_max=50 * MIB))
    jail = sandbox.make_jail("k")
    sandbox.limit_memory(200 * MIB)
    assert jail.limits().memory_max == 200 * MIB
    assert run(jail, f"bytearray({100 * MIB})") == (0, "")
    holder = start(jail, f"held = bytearray({100 * MIB})\nimport time; time.sleep(60)")
    until(lambda: (jail.usage().memory or 0) > 100 * MIB)
    if hierarchy.version == 1:
        with pytest.raises(OSError, match="busy"):
            sandbox.limit_memory(50 * MIB)
        assert jail.limits().memory_max == 200 * MIB
        holder.kill()
        assert ended(holder) == -9
        until(lambda: (jail.usage().memory or 0) < 50 * MIB)
        sandbox.limit_memory(50 * MIB)
    else:
        sandbox.limit_memory(50 * MIB)  # Linux kills the process
        assert ended(holder) == -9
    assert jail.limits().memory_max == 50 * MIB
    assert run(jail, f"bytearray({100 * MIB})") == (-9, "")


def test_fork_above_tasks_max_is_refused_and_counts_for_its_own_jail(
    hierarchy: Hierarchy,
) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits(tasks_max=20))
    jail, sibling = sandbox.make_jail("k"), sandbox.make_jail("sibling")
    assert run(jail, FORKS_UNTIL_REFUSED) == (0, "19\n")
    assert jail.events().pids_max_hits > 0
    assert sibling.events().pids_max_hits == 0
    assert jail.usage().tasks == len(jail.pids()) == 19


def test_quota_slows_a_busy_loop(hierarchy: Hierarchy) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits(cpu_quota=0.2)).make_jail("k")
    status, cpu_s = run(jail, BURN_A_SECOND)
    assert status == 0
    assert 0.05 < float(cpu_s) < 0.4
    assert (jail.usage().cpu_s or 0) >= float(cpu_s)


def test_fork_bomb_is_killed_as_a_whole(hierarchy: Hierarchy) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits(tasks_max=30, cpu_quota=1.0))
    jail, sibling = (
        sandbox.make_jail("k"),
        hierarchy.make_sandbox("b", CgroupLimits()).make_jail("k"),
    )
    bomb = start(jail, BOMB)
    until(lambda: jail.events().pids_max_hits > 0)
    assert run(sibling, "import os; os.fork(); os._exit(0)") == (0, "")
    jail.kill()
    assert ended(bomb) == -9
    jail.remove(20)
    assert not os.path.exists(jail.path)


def test_kill_leaves_another_jail_of_the_sandbox_alone(hierarchy: Hierarchy) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits())
    jail, other = sandbox.make_jail("1"), sandbox.make_jail("2")
    killed, spared = sleeper(jail), sleeper(other)
    jail.kill()
    assert ended(killed) == -9
    jail.remove(10)
    assert other.pids() == [spared.pid]
    spared.kill()
    ended(spared)


def test_limits_are_read_back(hierarchy: Hierarchy) -> None:
    limits = CgroupLimits(memory_max=64 * MIB, tasks_max=12, cpu_quota=0.25)
    jail = hierarchy.make_sandbox("a", limits).make_jail("k")
    assert jail.limits() == limits


def test_quota_that_was_lifted_holds_again_when_it_is_put_back(hierarchy: Hierarchy) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits(cpu_quota=0.25))
    jail = sandbox.make_jail("k")
    sandbox.throttle(False)
    assert jail.limits().cpu_quota != 0.25
    sandbox.throttle(True)
    assert jail.limits().cpu_quota == 0.25
    sandbox.remove()
    sandbox.throttle(False)  # gone is left alone


def test_process_is_where_it_entered(hierarchy: Hierarchy) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
    _, inside = run(jail, "print(open('/proc/self/cgroup').read())")
    assert jail.path.rpartition("/sbx-")[2] in inside
    assert jail.pids() == []


def test_enter_of_a_removed_group_fails_before_exec(hierarchy: Hierarchy) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
    jail.remove(0)
    with pytest.raises(subprocess.SubprocessError):
        run(jail, "")


def test_remove_with_processes_left_gives_up_at_its_deadline(hierarchy: Hierarchy) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits())
    jail = sandbox.make_jail("k")
    left = sleeper(jail)
    with pytest.raises(TimeoutError, match=str(left.pid)):
        jail.remove(0.05)
    sandbox.remove(10)  # kills what is left
    assert ended(left) == -9
    assert not os.path.exists(sandbox.path)
    sandbox.remove(0)  # gone is removed


def test_close_kills_what_is_left(hierarchy: Hierarchy) -> None:
    jail = hierarchy.make_sandbox("a", CgroupLimits()).make_jail("k")
    left = sleeper(jail)
    hierarchy.close(10)
    assert ended(left) == -9


def test_value_that_linux_refuses_leaves_no_group(hierarchy: Hierarchy) -> None:
    with pytest.raises(OSError, match=r"pids\.max"):
        hierarchy.make_sandbox("a", CgroupLimits(tasks_max=-5))
    hierarchy.make_sandbox("a", CgroupLimits(tasks_max=5)).remove()


def test_second_group_of_a_name_is_refused(hierarchy: Hierarchy) -> None:
    sandbox = hierarchy.make_sandbox("a", CgroupLimits())
    sandbox.make_jail("k")
    with pytest.raises(FileExistsError):
        hierarchy.make_sandbox("a", CgroupLimits())
    with pytest.raises(FileExistsError):
        sandbox.make_jail("k")


def test_groups_of_a_runtime_that_was_killed_are_swept(hierarchy: Hierarchy) -> None:
    def die() -> None:
        open_hierarchy(probe(), "dead").make_sandbox("a", CgroupLimits(tasks_max=5)).make_jail("k")
        os.kill(os.getpid(), 9)

    if (pid := os.fork()) == 0:
        try:
            die()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    (name,) = (name for name in hierarchy.sweep() if f"-{pid}-" in name)
    assert name.startswith("sbx-dead-")
    assert ours(hierarchy)
