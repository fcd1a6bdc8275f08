"""kill -9 of each process of the fast path, at each step of a start: who can serve does, who cannot
says so, and nothing is left.

A start is held at a step by stopping who would take the next one; see `STEPS`.
"""

import asyncio
import fcntl
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from chain import (
    Inside,
    Nest,
    broker,
    children,
    descendants,
    go_on,
    gone,
    kill,
    namespace,
    nest,
    nests,
    stop,
    tidy,
    until,
)

from sbx import AsyncSandbox, Runtime
from sbx.errors import Broken
from sbx.isolation.receipt import Receipt
from sbx.policy import load
from tests.tiers import rows

pytestmark = pytest.mark.needs("namespaces")
ROOT = Path(__file__).resolve().parents[2]
# In the zygote only: the kernel of the cold path is process 2 of its namespace.
SLEEPS_IN_THE_ZYGOTE = "import os, time\nif os.getpid() != 2:\n    time.sleep(3600)"
HOLDS_ALL = {"keeper", "monitor", "broker"}
DEFAULT = load("default")
FORK = DEFAULT.model_copy(update={"pool": DEFAULT.pool.model_copy(update={"min_idle": 0})})


# -- a start that is held at a step ----------------------------------------------------------------


@dataclass
class Held:
    """A start that cannot go on; `inside` is the jail it gets, where there is one by now."""

    starting: "asyncio.Task[Receipt]"
    nest: Nest
    inside: Inside | None = None

    def process(self, name: str) -> psutil.Process:
        owner = self.inside if name in ("supervisor", "kernel") else self.nest
        found = getattr(owner, name)
        assert isinstance(found, psutil.Process)
        return found


Step = Callable[[Runtime, AsyncSandbox, AsyncExitStack], Awaitable[Held]]


async def importing(_: Runtime, box: AsyncSandbox, __: AsyncExitStack) -> Held:
    """The zygote exists since the sandbox was created, and is not ready: it has no jail."""
    starting = asyncio.create_task(box.start())
    (new,) = await until(lambda: [one for one in nests(broker()) if not one.entered()])
    return Held(starting, new)


async def forking(_: Runtime, box: AsyncSandbox, after: AsyncExitStack) -> Held:
    """The zygote has its order, and has not begun."""
    found = nest()
    await stop(found.zygote)
    after.callback(go_on, found.zygote)
    starting = asyncio.create_task(box.start())
    await until(lambda: waits(found.broker))
    return Held(starting, found)


async def waiting(_: Runtime, box: AsyncSandbox, after: AsyncExitStack) -> Held:
    """The supervisor is born, and has not said that it is idle."""
    found = nest()
    before = children(found.keeper)
    starting = asyncio.create_task(box.start())
    while not (born := [one for one in children(found.keeper) if one not in before]):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await stop(born[0])
    after.callback(go_on, born[0])
    return Held(starting, found, Inside(found.monitor, found.keeper, born[0], born[0]))


async def entering(runtime: Runtime, box: AsyncSandbox, after: AsyncExitStack) -> Held:
    """The jail was told its sandbox and its walls, and has read neither."""
    found, idle = await _idle(runtime)
    await stop(idle.supervisor)
    after.callback(go_on, idle.supervisor)
    starting = asyncio.create_task(box.start())
    await until(lambda: any(map(unread, _control_sockets(runtime))))
    return Held(starting, found, idle)


async def booting(runtime: Runtime, box: AsyncSandbox, after: AsyncExitStack) -> Held:
    """The supervisor is sealed; the kernel is not ready."""
    found, idle = await _idle(runtime)
    await stop(idle.kernel)
    after.callback(go_on, idle.kernel)
    starting = asyncio.create_task(box.start())
    await until(lambda: namespace(idle.supervisor, "user") != namespace(found.keeper, "user"))
    return Held(starting, found, idle)


# The keeper and the monitor end with each other, and take turns here.
STEPS: dict[str, tuple[Step, tuple[str, ...]]] = {
    "importing": (importing, ("broker", "monitor", "zygote")),
    "forking": (forking, ("broker", "keeper", "zygote")),
    "waiting": (waiting, ("broker", "keeper", "zygote", "supervisor")),
    "entering": (entering, ("broker", "monitor", "zygote", "supervisor", "kernel")),
    "booting": (booting, ("broker", "keeper", "zygote", "supervisor", "kernel")),
}
SERVED_BY = {
    # what may serve the start in the end, by who was killed
    ("importing", "zygote"): {"cold"},
    ("forking", "zygote"): {"cold"},
    ("waiting", "zygote"): {"fork", "cold"},  # whether or not it had told of the fork
    ("waiting", "supervisor"): {"cold"},
    ("entering", "zygote"): {"pool"},
    ("booting", "zygote"): {"pool"},
    ("entering", "supervisor"): {"fork"},
    ("entering", "kernel"): {"fork"},
    ("booting", "supervisor"): {"fork"},
    ("booting", "kernel"): {"fork"},
}


EACH_STEP_AND_EACH_VICTIM = (
    ("importing", "monitor"),
    ("importing", "zygote"),
    ("forking", "broker"),
    ("waiting", "supervisor"),
    ("entering", "zygote"),
    ("entering", "kernel"),
    ("booting", "keeper"),
    ("booting", "supervisor"),
)
AFTER_THE_POOL = ("entering", "booting")


async def _idle(runtime: Runtime) -> tuple[Nest, Inside]:
    await runtime.warm(FORK)
    found = nest()
    (idle,) = found.idle()
    return found, idle


def waits(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_SLEEPING)


def _control_sockets(runtime: Runtime) -> list[int]:
    assert runtime._broker is not None
    return [jail.control.fileno() for jail in runtime._broker._jails.values()]


def unread(fd: int) -> int:
    """Bytes that were sent on a socket, and not read at its other end. unix(7), SIOCOUTQ."""
    answer = fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("i", answer)[0])


@asynccontextmanager
async def held(step: Step, runtime: Runtime, box: AsyncSandbox) -> AsyncIterator[Held]:
    async with AsyncExitStack() as after:
        held = await step(runtime, box, after)
        assert not held.starting.done()
        yield held


# -- the steps, and who is killed at each ----------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "victim"),
    rows(
        ((step, victim) for step, (_, victims) in STEPS.items() for victim in victims),
        ci_tier=EACH_STEP_AND_EACH_VICTIM,
    ),
)
async def test_killed_at_a_step_of_a_start_it_is_served_or_told_why_and_nothing_is_left(
    step: str, victim: str, request: pytest.FixtureRequest
) -> None:
    policy = FORK
    if step == "importing":
        policy = request.getfixturevalue("preloading")(SLEEPS_IN_THE_ZYGOTE)
    async with Runtime() as runtime, asyncio.timeout(90):
        async with await runtime.create(FORK) as other, await runtime.create(policy) as box:
            await other.run("kept = 1")
            async with held(STEPS[step][0], runtime, box) as now:
                kill(now.process(victim))
                await gone(now.process(victim))
                if victim == "monitor":
                    # The signal of its death is sent by then, and not yet obeyed: a jail that is
                    # let go before may still answer.
                    await gone(now.nest.keeper)
            if victim == "broker":
                await _all_have_ended(runtime, now)
                return
            receipt = await now.starting
            assert receipt.path in SERVED_BY.get((step, victim), {"cold"})
            assert bool(receipt.fallback) == (
                receipt.path != ("pool" if step in AFTER_THE_POOL else "fork")
            )
            assert (await box.run("1 + 1")).result == "2"
            lost = victim in HOLDS_ALL and step != "importing"
            run = await other.run("'kept' in globals()")
            assert (run.result, run.state_lost) == (str(not lost), lost)
        async with await runtime.create(FORK) as next_one:
            assert (await next_one.run("1 + 1")).result == "2"
        await tidy(runtime)


async def _all_have_ended(runtime: Runtime, now: Held) -> None:
    """The start is told of it, or was over just before."""
    (outcome,) = await asyncio.gather(now.starting, return_exceptions=True)
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, Broken)
        assert outcome.code == "broker_died"
    with pytest.raises(Broken, match="the broker ended"):
        await runtime.create(FORK)
    inside = [now.inside.supervisor, now.inside.kernel] if now.inside is not None else []
    await gone(now.nest.monitor, now.nest.keeper, now.nest.zygote, *inside)


# -- the program that embeds -----------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from sbx import Runtime

async def main():
    async with Runtime() as runtime:
        if "importing" not in sys.argv:
            await runtime.warm()
        print("warm", flush=True)
        sys.stdin.readline()
        narrower = {"pool": {"max_idle": 0}} if "forking" in sys.argv else {}
        async with await runtime.create(narrower=narrower) as box:
            await box.start()
            await box.run("import time; time.sleep(600)")

asyncio.run(main())
"""


@pytest.mark.full_tier
@pytest.mark.parametrize(
    "step",
    rows(["importing", "forking", "entering", "booting", "running"], ["forking", "running"]),
)
async def test_everything_ends_with_the_program_at_any_step_of_a_start(
    step: str, data_directories: Callable[[], set[Path]]
) -> None:
    with embedding(step) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdout.readline()
        itself = broker(psutil.Process(program.pid))
        await _hold(step, itself)
        program.stdin.write("go\n")
        program.stdin.flush()
        await _reach(step, itself)
        below = [itself, *descendants(itself)]
        program.kill()
        await gone(*below)
    async with Runtime():  # sweeps the data directory that nobody could remove
        assert len(data_directories()) == 1


def embedding(step: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, step]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe)


async def _hold(step: str, itself: psutil.Process) -> None:
    if step == "importing":
        return
    (found,) = nests(itself)
    (idle,) = found.idle()
    match step:
        case "forking":
            await stop(found.zygote)
        case "entering":
            await stop(idle.supervisor)
        case "booting":
            await stop(idle.kernel)


async def _reach(step: str, itself: psutil.Process) -> None:
    """Wait until the start has come to its step; it cannot leave it, or takes a while to."""
    match step:
        case "importing":
            await until(lambda: nests(itself))
        case "booting" | "running":
            await until(lambda: [jail for one in nests(itself) for jail in one.entered()])
        case _:
            await asyncio.sleep(0.1)  # what it waits for then is not to be seen from here
