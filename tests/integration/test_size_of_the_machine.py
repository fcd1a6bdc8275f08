"""Programs read the limits of their jail as the size of the machine, by each way to ask.

Otherwise a library takes a share of the memory of the host, and is killed.
"""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from sbx import Runtime
from sbx.policy import load
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.unprivileged
MIB = 1 << 20
SIZES = {"of the policy": None, "of a request": {"memory_max": "256MiB", "cpu_quota": 0.5}}
READ = """
import os, re, subprocess
def first(path):
    with open(path) as file:
        return file.readline().split()
page = os.sysconf('SC_PAGE_SIZE')
memory = [
    int(first('/proc/meminfo')[1]) << 10,
    int(first('/sys/fs/cgroup/memory.max')[0]),
    int(first('/sys/fs/cgroup/memory/memory.limit_in_bytes')[0]),
    os.sysconf('SC_PHYS_PAGES') * page,
    os.sysconf(os.sysconf_names['SC_PHYS_PAGES']) * page,
]
quota, period = map(int, first('/sys/fs/cgroup/cpu.max'))
cpus = [
    -(-quota // period),
    os.cpu_count(),
    len(os.sched_getaffinity(0)),
    os.sysconf('SC_NPROCESSORS_ONLN'),
    os.sysconf('SC_NPROCESSORS_CONF'),
]
print(sorted(set(memory)), sorted(set(cpus)))
"""
COMMAND = """
free -b | awk '/Mem:/ {print $2}'
nproc
getconf _NPROCESSORS_ONLN
python3 -c 'import os; print(os.cpu_count())'
"""


@pytest_asyncio.fixture(params=["fork", "cold"])
async def runtime_and_policy(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Runtime, Any]]:
    policy = load("default")
    pool = policy.pool.model_copy(update={"start": request.param})
    async with Runtime() as runtime:
        yield runtime, policy.model_copy(update={"pool": pool})


@pytest.mark.parametrize("name", SIZES)
async def test_each_way_to_ask_gives_the_limits(
    runtime_and_policy: tuple[Runtime, Any], name: str
) -> None:
    runtime, policy = runtime_and_policy
    limits = SIZES[name]
    narrower = {"limits": limits} if limits else None
    async with await runtime.create(policy, narrower=narrower) as box:
        memory = box.policy.limits.memory_max
        assert memory == (256 * MIB if limits else policy.limits.memory_max)
        run = await box.run(READ)
        assert run.stdout == f"[{memory}] [1]\n", run.error
        command = await box.shell(COMMAND)
        assert command.stdout.split() == [str(memory), "1", "1", "1"]


async def test_code_cannot_change_the_size(box: AsyncSandbox) -> None:
    for path in ("/proc/meminfo", "/sys/fs/cgroup/memory.max", "/sys/new"):
        run = await box.run(f"open({path!r}, 'w')")
        assert run.error is not None
        assert run.error.name == "PermissionError"


async def test_nothing_else_of_the_host_is_in_sys(box: AsyncSandbox) -> None:
    run = await box.run("import os; [name for _, _, names in os.walk('/sys') for name in names]")
    assert run.result is not None
    assert set(re.findall(r"[\w.]+", run.result)) == {
        *("memory.max", "memory.limit_in_bytes", "cpu.max", "cpu.cfs_quota_us"),
        *("cpu.cfs_period_us", "pids.max", "online", "possible", "present", "meminfo"),
    }


async def test_a_killed_run_names_the_limit(box: AsyncSandbox) -> None:
    run = await box.run("x = bytearray(1 << 32)\nx[::4096] = b'x' * len(x[::4096])")
    assert run.status in ("killed", "error")
    assert run.error is not None
    assert run.error.name == "MemoryError" or str(box.policy.limits.memory_max) in run.error.value
