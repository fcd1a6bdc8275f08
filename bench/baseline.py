"""What people have today, without sbx: ipykernel driven by jupyter_client, a subprocess, bwrap.

A kernel counts as started when jupyter_client's own `wait_for_ready` says so; 0.2 s of that are its
client listening until nothing more comes. Its heartbeat thread is left out, in its favour.
"""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from bench.samples import NotMeasured

# Of the machine that the bounds were set on, where a range was measured its lower end.
KERNEL_MS = 457.0
KERNEL_WITH_PANDAS_MS = 670.0
CELL_MS = 4.5
FIRST_BYTE_MS = 205.0
TEARDOWN_MS = 15.0
CHURN_PER_S = 4.8

_KERNEL_S = 60.0
_BWRAP = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent"]
_BWRAP += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]


class Ipykernel:
    """A kernel of today; `ipykernel` makes one."""

    def __init__(self, manager: AsyncKernelManager, client: AsyncKernelClient) -> None:
        self._manager = manager
        self._client = client

    @property
    def pid(self) -> int:
        provisioner = self._manager.provisioner
        assert isinstance(provisioner, LocalProvisioner)
        assert provisioner.pid is not None
        return provisioner.pid

    async def run(self, code: str) -> str | None:
        """Execute a cell until the kernel is idle again; its result as text."""
        results: list[str] = []

        def see(message: dict[str, Any]) -> None:
            if message["msg_type"] == "execute_result":
                results.append(message["content"]["data"]["text/plain"])

        await self.execute(code, see)
        return results[0] if results else None

    async def execute(
        self, code: str, see: Callable[[dict[str, Any]], None] = lambda message: None
    ) -> None:
        """Execute a cell, giving every message of its output to `see` when it comes."""
        reply = await self._client.execute_interactive(
            code, timeout=_KERNEL_S, output_hook=see, allow_stdin=False
        )
        if reply["content"]["status"] != "ok":
            raise NotMeasured(f"the baseline's kernel failed: {reply['content']}")

    async def cell_ms(self) -> float:
        """Milliseconds of 1+1, until the kernel is idle again."""
        began = time.perf_counter()
        result = await self.run("1+1")
        ended = time.perf_counter()
        if result != "2":
            raise NotMeasured(f"the baseline's 1+1 gave {result!r}")
        return (ended - began) * 1000

    async def kill_ms(self) -> float:
        """Milliseconds from its SIGKILL until the process is gone; without the time until
        jupyter_client, which asks every 100 ms, notices."""
        fd = os.pidfd_open(self.pid)
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, gone.set)
        try:
            began = time.perf_counter()
            ending = asyncio.ensure_future(self._manager.shutdown_kernel(now=True))
            await gone.wait()
            ended = time.perf_counter()
            await ending
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return (ended - began) * 1000


@asynccontextmanager
async def ipykernel(preload: Sequence[str] = ()) -> AsyncIterator[Ipykernel]:
    """A new kernel, ready, with these modules imported; it is gone afterwards."""
    manager = AsyncKernelManager()
    try:
        await manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = manager.client()
        client.start_channels(hb=False)
        try:
            await client.wait_for_ready(timeout=_KERNEL_S)
            kernel = Ipykernel(manager, client)
            if preload:
                await kernel.execute(f"import {', '.join(preload)}")
            yield kernel
        finally:
            client.stop_channels()
    finally:
        await manager.shutdown_kernel(now=True)


async def start_ms(preload: Sequence[str] = ()) -> float:
    """Milliseconds from nothing to a kernel that is ready and has imported `preload`."""
    began = time.perf_counter()
    async with ipykernel(preload):
        return (time.perf_counter() - began) * 1000


async def first_result_ms() -> float:
    """Milliseconds from nothing to the result of 1+1."""
    began = time.perf_counter()
    async with ipykernel() as kernel:
        result = await kernel.run("1+1")
        ended = time.perf_counter()
    assert result == "2", result
    return (ended - began) * 1000


def subprocess_ms(command: str) -> float:
    """Milliseconds of a shell command, without walls and without asyncio."""
    began = time.perf_counter()
    subprocess.run(["/bin/bash", "-c", "--", command], check=True, capture_output=True)
    return (time.perf_counter() - began) * 1000


def bwrap_ms() -> float:
    """Milliseconds of `true` in bwrap's namespaces, without a cgroup, a filter or a seal."""
    began = time.perf_counter()
    subprocess.run([*_BWRAP, "true"], check=True)
    return (time.perf_counter() - began) * 1000


def bwrap_kill_ms() -> float:
    """Milliseconds from bwrap's SIGKILL until it and all in its namespaces are gone."""
    with subprocess.Popen(
        [*_BWRAP, "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.perf_counter()
        process.kill()
        process.wait()
        process.stdout.read()  # its end: whoever was inside has let go of it
        return (time.perf_counter() - began) * 1000
