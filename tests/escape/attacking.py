"""Attacks: one a test, and each seen to succeed where the wall it tests is missing.

    attack(box, code)          runs code in the kernel; its outcome in one word
    attack_by_shell(box, code) the same as a program started by a shell command, beside the kernel
    without("seccomp", …)      a sandbox that lacks these walls, for the control
    by("fork")                 kernels that start within come by this path
    one_path()                 marks a test that is run by one path only

An outcome is `ok`, the name of an errno or else of the exception that the code met, `killed:memory`
and its kin, or `timeout`. What the code may use beside Python is in PRELUDE.

Sandboxes are kept for the module: each attack either leaves its own usable, or asks for a new one
by `fresh`. Controls take walls away by altering the plan before it is launched, so everything else
is as it would be; where a control would endanger this host, the test says so instead.
"""

import asyncio
import dataclasses
import errno
import platform
import re
import shlex
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from sbx.isolation import argv
from sbx.isolation import plan as plan_of
from sbx.isolation.launch_plan import Bind, LaunchPlan, Seal
from sbx.isolation.seccomp import Filter
from sbx.isolation.seccomp.compiler import number_of
from sbx.kernels import kernel as kernel_of
from sbx.kernels.kernel import Kernel
from sbx.kernels.pool.factory import KernelFactory
from sbx.kernels.pool.warm_pool import LaunchRequest
from sbx.protocol.runs import Run, Status
from sbx.runtime import resources
from sbx.runtime.sandbox import AsyncSandbox

Alter = Callable[[LaunchPlan], LaunchPlan]
Fresh = Callable[..., Awaitable[AsyncSandbox]]
Without = Callable[..., Awaitable[AsyncSandbox]]

CALLS = (
    "add_key bpf chmod clone clone3 fchmodat2 fsopen init_module io_uring_setup kcmp keyctl"
    " mount move_mount name_to_handle_at open_by_handle_at open_tree openat2 perf_event_open"
    " pidfd_getfd pidfd_open pivot_root process_vm_readv process_vm_writev ptrace request_key"
    " seccomp setns shmat shmctl shmdt shmget syslog umount2 unshare userfaultfd"
)
PRELUDE = """
import array, ctypes, errno, glob, os, signal, socket, stat, struct, subprocess, sys, threading
import time
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
NUMBERS = {numbers}

def call(name, *args):
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = _libc.syscall(ctypes.c_long(NUMBERS.get(name, name)), *words)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{{name}}: {{os.strerror(number)}}")
    return result

def names_of(act, *args):
    'What becomes of a call, in one word.'
    try:
        act(*args)
        return "ok"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
"""


def prelude() -> str:
    machine = platform.machine()
    numbers = {name: number_of(name, machine) for name in CALLS.split()}
    return PRELUDE.format(numbers=numbers)


# -- attacks ---------------------------------------------------------------------------------------


async def attack(box: AsyncSandbox, code: str, *, timeout: float | None = None) -> str:
    """What becomes of `code` as a cell."""
    return outcome(await run(box, code, timeout=timeout))


async def run(box: AsyncSandbox, code: str, *, timeout: float | None = None) -> Run:
    """The whole run, where one word of it is not enough."""
    return await box.run(prelude() + code, timeout=timeout)


async def tell(box: AsyncSandbox, code: str) -> Any:
    """The value of the last expression of `code`, which must end well."""
    found = await run(box, code)
    assert found.ok, found.error
    assert found.result is not None
    return eval(found.result, {})


async def attack_by_shell(box: AsyncSandbox, code: str, *, timeout: float | None = None) -> str:
    """What becomes of `code` in a Python that a shell command starts."""
    command = f"exec {shlex.quote(sys.executable)} -I -"
    done = await box.shell(command, stdin=prelude() + code, timeout=timeout)
    if done.status is Status.ERROR:
        return _word(done.stderr.strip().rpartition("\n")[2])
    return outcome(done)


def outcome(done: Run) -> str:
    if done.cause is not None:
        return f"killed:{done.cause}"
    if done.status is Status.ERROR and done.error is not None:
        return _word(f"{done.error.name}: {done.error.value}")
    return str(done.status)


def _word(error: str) -> str:
    """`PermissionError: [Errno 1] Operation not permitted` is EPERM; else the exception's name."""
    if found := re.search(r"\[Errno (\d+)\]", error):
        return errno.errorcode[int(found[1])]
    return error.partition(":")[0].strip()


async def watched(doing: Coroutine[Any, Any, Any]) -> tuple[Any, int, float]:
    """What it gives, by how much the memory of this process grew at most, and the longest time
    for which its loop stood still."""
    process, over = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    most = [before]

    def look() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], process.memory_info().rss)

    watcher = threading.Thread(target=look)
    watcher.start()
    task = asyncio.ensure_future(doing)
    stalled = 0.0
    try:
        while not task.done():
            began = time.monotonic()
            await asyncio.wait([task], timeout=0.005)
            stalled = max(stalled, time.monotonic() - began - 0.005)
        return await task, most[0] - before, stalled
    finally:
        over.set()
        watcher.join()


# -- sandboxes, with and without a wall ------------------------------------------------------------

ALLOW_ALL = Filter("none", struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), "none")


def _no_landlock(plan: LaunchPlan) -> LaunchPlan:
    return replace(plan, seal=replace(plan.seal, landlock=False, files_only=()))


def _no_seccomp(plan: LaunchPlan) -> LaunchPlan:
    bare = replace(plan.seal, kernel_filter=None, jail_filter=None, last_filter=None)
    return replace(plan, filter=ALLOW_ALL, seal=bare)


def _no_rlimits(plan: LaunchPlan) -> LaunchPlan:
    seal: Seal = replace(plan.seal, rlimits=())
    return replace(plan, seal=seal)


def _all_writable(plan: LaunchPlan) -> LaunchPlan:
    """Only what lies below the workspace and /opt: never the host's system or interpreter."""
    return alter_binds(
        plan,
        lambda bind: (
            replace(bind, writable=True)
            if bind.target.startswith(("/workspace", "/opt/mounted"))
            else bind
        ),
    )


def _no_pins(plan: LaunchPlan) -> LaunchPlan:
    """Nothing is mounted below /workspace."""
    below = "/workspace/"
    return alter_binds(plan, lambda bind: None if bind.target.startswith(below) else bind)


def _with_userns(plan: LaunchPlan) -> LaunchPlan:
    return replace(plan, options=plan.options - {"--disable-userns"})


WALLS: dict[str, Alter] = {
    "landlock": _no_landlock,
    "seccomp": _no_seccomp,
    "rlimits": _no_rlimits,
    "read-only": _all_writable,
    "pins": _no_pins,
    "disable-userns": _with_userns,
}
NAMESPACES = ("net", "ipc", "uts", "cgroup")
# Words of bubblewrap's: what a zygote forks makes its own namespaces, and forbids others, always.
ONLY_COLD = {*NAMESPACES, "disable-userns"}


def alter_binds(plan: LaunchPlan, change: Callable[[Bind], Bind | None]) -> LaunchPlan:
    mounts = [change(mount) if isinstance(mount, Bind) else mount for mount in plan.mounts]
    own_mounts = map(change, plan.own_mounts)
    return replace(
        plan,
        mounts=tuple(mount for mount in mounts if mount is not None),
        own_mounts=tuple(mount for mount in own_mounts if mount is not None),
    )


# -- by which path a kernel starts -----------------------------------------------------------------

PATHS = ("pool", "fork", "cold")
POLICIES = ("default", "strict")
CI_CELLS = (("pool", "default"), ("fork", "strict"))
_start = KernelFactory.start


def attacked_paths(config: pytest.Config) -> tuple[str, ...]:
    """Return the paths by which the kernels start that the escape tests attack. The CI tier attacks
    kernels of the pool."""
    if path := config.getoption("--path"):
        return (path,)
    return PATHS if config.getoption("--full") else PATHS[:1]


def attacked_cells(config: pytest.Config) -> list[tuple[str, str]]:
    """Return the cells (path, policy) of the matrix in which the attack set is tried."""
    path, policy = config.getoption("--path"), config.getoption("--policy")
    every = path or policy or config.getoption("--full")
    return [
        cell
        for cell in (product(PATHS, POLICIES) if every else CI_CELLS)
        if path in (None, cell[0]) and policy in (None, cell[1])
    ]


@contextmanager
def by(path: str) -> Iterator[None]:
    """Every kernel that is started within comes by this path, and is seen to."""
    turn = asyncio.Lock()  # else the one that was idle for this start is taken by another

    async def start(starter: KernelFactory, order: LaunchRequest) -> Kernel:
        key = order.key
        assert key is not None
        if path == "cold":
            order = replace(order, key=None)
        elif path == "fork":  # from a pool where nothing is ever idle
            order = replace(
                order, key=dataclasses.replace(key, min_idle=0, max_idle=0), pooled=False
            )
        async with turn:
            if order.key is not None and order.key not in starter._pools:
                leave_few_zygotes(starter)
            if path == "pool":
                await starter.warm(key, 1)
            kernel = await _start(starter, order)
        assert kernel.receipt.path == path, kernel.receipt.fallback
        return kernel

    patch = pytest.MonkeyPatch()
    patch.setattr(KernelFactory, "start", start)
    patch.setattr(
        KernelFactory, "take_prewarmed", lambda *_: None
    )  # it came by a path of its own choice
    try:
        yield
    finally:
        patch.undo()


def one_path(path: str = "pool") -> pytest.MarkDecorator:
    """For a test of something that does not know how its kernel started; a comment says why."""
    return pytest.mark.parametrize("started_by", [path], indirect=True, scope="module")


_KEPT_ZYGOTES = 3


def leave_few_zygotes(starter: KernelFactory) -> None:
    """End all zygotes but those used last: a runtime has eight at most, and starts no kernel from
    a ninth while each of them was used a moment ago. The kernels that they forked live on."""
    oldest_first = sorted(starter._pools, key=lambda key: starter._pools[key].used_at)
    for key in oldest_first[:-_KEPT_ZYGOTES]:
        if not starter._pools[key].busy:
            starter._drop(key)


_is_altering: ContextVar[bool] = ContextVar("_is_altering", default=False)


@contextmanager
def altered(*walls: str, change: Alter | None = None) -> Iterator[None]:
    """What is launched within lacks these walls; `NAMESPACES` are then shared with the host.

    A kernel that the runtime prepares meanwhile for other tests has all walls: its task has a
    context of its own.
    """
    real_plan, real_namespaces = plan_of.plan, argv._NAMESPACES

    def plan(*words: Any) -> LaunchPlan:
        made = real_plan(*words)
        if not _is_altering.get():
            return made
        for wall in walls:
            if wall in WALLS:
                made = WALLS[wall](made)
        return change(made) if change is not None else made

    patch = pytest.MonkeyPatch()
    patch.setattr(resources, "plan", plan)
    kept = tuple(name for name in real_namespaces if name not in walls)
    patch.setattr(argv, "_NAMESPACES", kept)
    if len(kept) < len(real_namespaces):  # which a receipt would refuse
        patch.setattr(kernel_of, "own_namespaces", dict)
    token = _is_altering.set(True)
    try:
        yield
    finally:
        _is_altering.reset(token)
        patch.undo()
