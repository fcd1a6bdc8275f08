"""The processes of a runtime, as linux shows them to their ancestor: who is below whom.

    program ─ broker ─ monitor ─ keeper ─ zygote ─ kernel       forked
                    │                   └ supervisor
                    └─ monitor ─ supervisor ─ kernel            cold

`monitor` is bubblewrap. Supervisor and kernel are known by their numbers in the jail's own PID
namespace, 1 and 2. No module of sbx is asked what there is, save by `tidy`, which compares.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from sbx import AsyncSandbox, Runtime

T = TypeVar("T")

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Nest:
    """A zygote and who holds it."""

    broker: psutil.Process
    monitor: psutil.Process
    keeper: psutil.Process
    zygote: psutil.Process

    def jails(self) -> list["Inside"]:
        """Those that were forked here and have a kernel by now, in the order of their forks."""
        return _jails_below(self.keeper, self.monitor, self.keeper)

    def idle(self) -> list["Inside"]:
        """Those that have entered no sandbox: that is where they get a user namespace."""
        own = namespace(self.keeper, "user")
        return [jail for jail in self.jails() if namespace(jail.supervisor, "user") == own]

    def entered(self) -> list["Inside"]:
        """The others, which somebody uses."""
        own = namespace(self.keeper, "user")
        return [jail for jail in self.jails() if namespace(jail.supervisor, "user") != own]


@dataclass(frozen=True, slots=True)
class Inside:
    """The processes of one jail, and those above it; one of the cold path has no keeper."""

    monitor: psutil.Process
    keeper: psutil.Process | None
    supervisor: psutil.Process
    kernel: psutil.Process


def broker(program: psutil.Process | None = None) -> psutil.Process:
    """The broker that was started last: the runtime that all tests share has another one."""
    found = _children_with("sbx.isolation.broker.server", program or psutil.Process())
    return max(found, key=psutil.Process.create_time)


def nests(itself: psutil.Process) -> list[Nest]:
    """The zygotes of a broker that are there already, whether or not they are ready."""
    found = []
    for monitor in monitors(itself, "zygote.py"):
        for keeper in children(monitor):
            own = namespace(keeper, "pid")
            below = [one for one in children(keeper) if namespace(one, "pid") == own]
            zygotes = [one for one in below if _number(one) > 2]  # 2 is forked to be nobody
            found += [Nest(itself, monitor, keeper, zygote) for zygote in zygotes]
    return found


def nest(program: psutil.Process | None = None) -> Nest:
    """The only one."""
    (found,) = nests(broker(program))
    return found


def cold_jails(itself: psutil.Process) -> list[Inside]:
    return [
        jail
        for monitor in monitors(itself, "cold.py")
        for jail in _jails_below(monitor, monitor, None)
    ]


def _jails_below(
    top: psutil.Process, monitor: psutil.Process, keeper: psutil.Process | None
) -> list[Inside]:
    """Those that have a supervisor and a kernel by now, in the order of their starts."""
    own = namespace(top, "pid")
    numbered: dict[str, dict[int, psutil.Process]] = {}
    for process in descendants(top):
        inside = namespace(process, "pid")
        if inside is not None and inside != own:
            numbered.setdefault(inside, {})[_number(process)] = process
    whole = [found for found in numbered.values() if found.keys() >= {1, 2}]
    jails = [Inside(monitor, keeper, found[1], found[2]) for found in whole]
    return sorted(jails, key=lambda jail: jail.supervisor.create_time())


def _number(process: psutil.Process) -> int:
    """The process's number in its own PID namespace; 0 when it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def descendants(top: psutil.Process) -> list[psutil.Process]:
    found, todo = [], [top]
    while todo:
        todo += (below := children(todo.pop()))
        found += below
    return found


def used_jail(box: AsyncSandbox) -> Inside:
    """The jail of this sandbox's kernel. Others may have been prewarmed for the next sandbox."""
    itself, inside = broker(), box.conversation("default").processes
    jails = cold_jails(itself) + [jail for one in nests(itself) for jail in one.entered()]
    (found,) = [jail for jail in jails if jail.kernel.pid in inside]
    return found


def monitors(itself: psutil.Process, of: str = "--args") -> list[psutil.Process]:
    """The bubblewraps that a broker started; what it tried its host with may still be ending."""
    return [one for one in _children_with("--args", itself) if of in " ".join(_words(one))]


def children(parent: psutil.Process) -> list[psutil.Process]:
    """Those that live; none when the parent has ended. psutil's own way reads all of /proc."""
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{parent.pid}/task"):
            words = Path(f"/proc/{parent.pid}/task/{thread}/children").read_text().split()
            for word in words:
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(word)))
    return [child for child in found if lives(child)]


def _children_with(word: str, parent: psutil.Process) -> list[psutil.Process]:
    return [one for one in children(parent) if any(word in part for part in _words(one))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # or it is a zombie
        return []


def namespace(process: psutil.Process, kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/{kind}")
    except OSError:
        return None


# -- what is done to them, and waited for ----------------------------------------------------------


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


async def stop(process: psutil.Process) -> None:
    """SIGSTOP, which works at some moment after kill(2) has returned."""
    process.send_signal(signal.SIGSTOP)
    await until(lambda: process.status() == psutil.STATUS_STOPPED)


def go_on(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


async def until_stopped(box: AsyncSandbox) -> None:
    """Wait until a process of its kernel has stopped itself."""
    await until(lambda: any(map(_is_stopped, box.conversation("default").processes)))


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


async def until_there(box: AsyncSandbox, name: str) -> None:
    """Wait for a file that code inside makes, and delete it."""
    async with asyncio.timeout(PATIENCE_S):
        while name not in {one.name for one in await box.files.list()}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await box.files.delete(name)


async def until(true: Callable[[], T], limit_s: float = PATIENCE_S) -> T:
    """The first answer that is one."""
    async with asyncio.timeout(limit_s):
        while not (found := true()):  # noqa: ASYNC110  # it is linux's, which sets no event
            await asyncio.sleep(0.005)
        return found


async def all_gone(*inside: Inside) -> None:
    await gone(*(process for jail in inside for process in (jail.supervisor, jail.kernel)))


async def gone(*processes: psutil.Process) -> None:
    await until(lambda: not any(lives(process) for process in processes))


async def tidy(runtime: Runtime) -> None:
    """Wait until nothing is below the broker but zygotes, and what the pools know to be idle."""
    await until(lambda: is_tidy(runtime))


def is_tidy(runtime: Runtime) -> bool:
    itself, starter = broker(), runtime._starter
    assert starter is not None
    idle = sum(pool.idle for pool in starter._pools.values())
    return len(descendants(itself)) == 3 * len(nests(itself)) + 2 * idle
