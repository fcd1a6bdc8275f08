"""The faults. Each strikes only the service that the bench started, and what that one started."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from random import Random
from typing import Any

import psutil

from bench.torture.ledger import Struck
from bench.torture.plan import ENDING, Fault, is_calm
from bench.torture.service_process import ServiceUnderTest

_AT_ONCE = 2
_READY_S = 60.0  # for a process that a fault can strike
_WORK_S = 3.0  # for the clients, before a fault strikes a new process
_CONNECTIONS = 1_100
_SPARE_FILES = 3
_JAILS = 4
_CHUNK = b"\0" * (1 << 20)
_REFILL_S = 0.05


class Impossible(Exception):
    """This host does not allow the fault."""


class Injector:
    """Strikes as a plan says."""

    def __init__(self, service: ServiceUnderTest, random: Random) -> None:
        self._service = service
        self._random = random
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._stopping = asyncio.Lock()  # SIGCONT of one fault would end that of another one

    async def carry_out(self, plan: Sequence[Fault], since: float, seconds: float) -> None:
        """Make every fault at its time after `since`, or as soon as fewer than two others last.

        Left out: a fault that is so late that the run has ended, or the calm part has begun."""
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(max(0.0, since + fault.at - self._service.now()))
                await self._at_once.acquire()
                at = self._service.now() - since
                if at > seconds or (fault.kind in ENDING and is_calm(at, seconds)):
                    self._at_once.release()
                    continue
                group.create_task(self._strike(fault))

    async def _strike(self, fault: Fault) -> None:
        began, note = self._service.now(), ""
        try:
            async with asyncio.timeout(_READY_S):
                while not self._service.ready.is_set():
                    await self._service.ready.wait()
                    await asyncio.sleep(_WORK_S)  # a service that does nothing survives everything
            began = self._service.now()
            await self._act(fault.kind)(fault.for_s)
        except TimeoutError:
            note = "the service was not ready"
        except (Impossible, psutil.Error, OSError) as error:
            note = str(error) or type(error).__name__
        finally:
            self._at_once.release()
        self._service.ledger.faults.append(Struck(fault.kind, began, self._service.now(), note))

    def _act(self, kind: str) -> Callable[[float], Awaitable[None]]:
        return {
            "kill": self._kill,
            "terminate": self._terminate,
            "broker_kill": self._broker_kill,
            "broker_silent": self._broker_silent,
            "broker_pause": self._broker_pause,
            "jails_kill": self._jails_kill,
            "jails_pause": self._jails_pause,
            "disk_full": self._disk_full,
            "store_locked": self._store_locked,
            "silent_connections": self._silent_connections,
            "few_descriptors": self._few_descriptors,
        }[kind]

    # -- the service and its broker ---------------------------------------------------------------

    async def _kill(self, _: float) -> None:
        self._service.expect("kill")
        os.kill(self._service.pid, signal.SIGKILL)

    async def _terminate(self, _: float) -> None:
        await self._service.restart()

    async def _broker_kill(self, _: float) -> None:
        broker = self._broker()
        self._service.expect("broker_kill")
        broker.kill()

    async def _broker_silent(self, _: float) -> None:
        """The service must notice it, end and start again. `ServiceUnderTest` checks this."""
        async with self._stopping:
            broker = self._broker()
            self._service.expect("broker_silent")
            broker.suspend()

    async def _broker_pause(self, for_s: float) -> None:
        async with self._stopping:
            if not self._service.ready.is_set():
                raise Impossible("the service ends already")
            await _paused([self._broker()], for_s)

    def _broker(self) -> psutil.Process:
        if (broker := self._service.broker()) is None:
            raise Impossible("the service has no broker")
        return broker

    # -- zygotes, kernels and the processes around them -------------------------------------------

    async def _jails_kill(self, _: float) -> None:
        for process in self._jails():
            with suppress(psutil.Error):
                process.kill()

    async def _jails_pause(self, for_s: float) -> None:
        await _paused(self._jails(), for_s)

    def _jails(self) -> list[psutil.Process]:
        """Some processes below the broker."""
        below = self._broker().children(recursive=True)
        return self._random.sample(below, min(_JAILS, len(below)))

    # -- what the service uses up -----------------------------------------------------------------

    async def _disk_full(self, for_s: float) -> None:
        if not self._service.disk.small:
            raise Impossible("no small file system, which takes root")
        filler = self._service.disk.filler
        with self._excuse("disk_full"), filler.open("wb", buffering=0) as file:
            try:
                async with asyncio.timeout(for_s):
                    while True:
                        _fill(file.fileno())
                        await asyncio.sleep(_REFILL_S)
            except TimeoutError:
                pass
            finally:
                filler.unlink()

    async def _store_locked(self, for_s: float) -> None:
        path = self._service.disk.data / "store.sqlite"
        with self._excuse("store_locked"):
            place = f"file:{path}?mode=rw"
            store = sqlite3.connect(place, uri=True, timeout=0, isolation_level=None)
            with closing(store) as on:
                while True:
                    try:
                        on.execute("BEGIN IMMEDIATE")
                        break
                    except sqlite3.OperationalError:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(for_s)
                on.execute("ROLLBACK")

    async def _silent_connections(self, for_s: float) -> None:
        """Connections that send nothing, which come again when the service closes them."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_CONNECTIONS):
                group.create_task(self._silent(self._service.now() + for_s))

    async def _silent(self, until: float) -> None:
        while self._service.now() < until:
            try:
                async with asyncio.timeout(max(0.0, until - self._service.now())):
                    reader, writer = await asyncio.open_connection(*self._service.tcp)
                    try:
                        await reader.read()
                    finally:
                        writer.transport.abort()
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)

    async def _few_descriptors(self, for_s: float) -> None:
        """Let the service open only a few files more than it has."""
        pid = self._service.pid
        with self._excuse("few_descriptors"), ExitStack() as undo:
            before = _limits(pid)
            few = len(os.listdir(f"/proc/{pid}/fd")) + _SPARE_FILES
            undo.callback(_limit, pid, *before)
            _limit(pid, min(few, before[1]), before[1])
            await asyncio.sleep(for_s)

    @contextmanager
    def _excuse(self, name: str) -> Iterator[None]:
        self._service.excuses.add(name)
        try:
            yield
        finally:
            self._service.excuses.discard(name)


async def _paused(processes: Sequence[psutil.Process], for_s: float) -> None:
    stopped = []
    try:
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()
                stopped.append(process)
        await asyncio.sleep(for_s)
    finally:
        for process in stopped:
            with suppress(psutil.Error):
                process.resume()


def _fill(fd: int) -> None:
    """Write until nothing fits, at last single bytes."""
    size = len(_CHUNK)
    while size:
        try:
            os.write(fd, _CHUNK[:size])
        except OSError:
            size //= 4


def _limits(pid: int) -> tuple[int, int]:
    """How many files a process may open: the soft limit and the hard one."""
    with open(f"/proc/{pid}/limits", encoding="ascii") as lines:
        words = next(line.split() for line in lines if line.startswith("Max open files"))
    return int(words[3]), int(words[4])


def _limit(pid: int, soft: int, hard: int) -> None:
    """Set the limit of open files of a process, as its own user: that needs no capability. Raises
    Impossible."""
    if (program := shutil.which("prlimit")) is None:
        raise Impossible("no program prlimit, which util-linux has")
    command = [program, "--pid", str(pid), f"--nofile={soft}:{hard}"]
    with suppress(psutil.NoSuchProcess):
        user, group = psutil.Process(pid).uids().real, psutil.Process(pid).gids().real
        as_root: dict[str, Any] = {}
        if os.geteuid() == 0:
            as_root = {"user": user, "group": group, "extra_groups": []}
        ended = subprocess.run(command, check=False, capture_output=True, text=True, **as_root)
        if ended.returncode and psutil.pid_exists(pid):
            raise Impossible(f"its limits cannot be set: {ended.stderr.strip()[-200:]}")
