"""kill -9 of whatever a notebook's kernel consists of: all inside dies, nothing waits for ever,
nothing is left, and whoever started the kernel finds that it is gone and can start another.

    client ─ jupyter_client ─ provisioner, runtime ─ broker ─ … ─ PID 1 ─ kernel
    client ─ jupyter_client ─ `python -m sbx.jupyter`, runtime ─ broker ─ … ─ PID 1 ─ kernel
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from chain import Inside, broker, children, cold_jails, gone, kill, nests, until
from jupyter_client.manager import AsyncKernelManager
from jupyter_specs import DEFAULT, STANDALONE, jupyter_kernels
from notebooks import CellMessages, execute, finished

from sbx import Runtime
from tests.tiers import rows

__all__ = ["jupyter_kernels"]
ROOT = Path(__file__).resolve().parents[2]
BUSY = """
import subprocess, time
open('kept', 'w').close()
child = subprocess.Popen(['sleep', '600'])
print('busy', flush=True)
time.sleep(600)
"""
PROGRAM = f"""
import sys
from jupyter_client.manager import KernelManager

BUSY = {BUSY!r}
kernel, transport, file = sys.argv[1:]
manager = KernelManager(kernel_name=kernel, transport=transport, connection_file=file)
manager.start_kernel()
client = manager.client()
client.start_channels(hb=False)
client.wait_for_ready(timeout=60)
client.execute(BUSY)
while client.get_iopub_msg()["msg_type"] != "stream":
    pass
print("busy", flush=True)
sys.stdin.read()
"""


class Started:
    def __init__(self, manager: AsyncKernelManager, client: Any) -> None:
        self.manager = manager
        self.client = client

    async def busy(self) -> str:
        """A cell that goes on; its name."""
        name: str = self.client.execute(BUSY, allow_stdin=False)
        while (await self.client.get_iopub_msg(timeout=60))["msg_type"] != "stream":
            pass
        return name

    async def dies(self) -> None:
        async with asyncio.timeout(60):
            while await self.manager.is_alive():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def starts_again(self) -> CellMessages:
        await self.manager.restart_kernel(now=True)
        await self.client.wait_for_ready(timeout=60)
        return await execute(self.client, "import os; print(os.path.exists('kept'))")


@asynccontextmanager
async def started(kernel: str) -> AsyncIterator[Started]:
    manager = AsyncKernelManager(kernel_name=kernel)
    await manager.start_kernel()
    client = manager.client()
    client.start_channels(hb=False)
    try:
        await client.wait_for_ready(timeout=60)
        yield Started(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
        client.context.destroy(linger=0)


def its_jail(itself: psutil.Process) -> Inside:
    """The one in which something was started: others are prewarmed. It may have come by the cold
    path, where a test before this one killed the zygote."""
    jails = cold_jails(itself) + [jail for one in nests(itself) for jail in one.entered()]
    (found,) = [jail for jail in jails if children(jail.kernel)]
    return found


def below(process: psutil.Process) -> list[psutil.Process]:
    found: list[psutil.Process] = process.children(recursive=True)
    return found


# -- what is inside, or below ----------------------------------------------------------------------


@pytest.mark.parametrize("victim", rows(["supervisor", "kernel", "keeper"], ["kernel"]))
async def test_the_jail_killed_in_a_cell_its_client_is_told_and_the_next_kernel_has_the_files(
    victim: str,
) -> None:
    async with started(DEFAULT) as it:
        name = await it.busy()
        jail = its_jail(broker())
        kill(getattr(jail, victim))
        answer = await finished(it.client, name)
        assert answer.reply["content"]["status"] == "error"
        assert answer.reply["content"]["ename"] == "KernelDied"
        assert len(answer.contents("error")) == 1
        await it.dies()
        await gone(jail.supervisor, jail.kernel)
        assert (await it.starts_again()).stdout == "True\n"


@pytest.mark.parametrize("victim", rows(["supervisor", "kernel"], ["supervisor"]))
async def test_the_jail_killed_at_rest_whoever_started_it_notices(victim: str) -> None:
    """Nobody asks it anything: that it is gone must show by itself."""
    async with started(DEFAULT) as it:
        await execute(it.client, BUSY.replace("time.sleep(600)", ""))
        kill(getattr(its_jail(broker()), victim))
        await it.dies()
        assert (await it.starts_again()).reply["content"]["status"] == "ok"


@pytest.mark.full_tier
async def test_the_broker_killed_in_a_cell_its_client_is_told_and_a_new_one_serves() -> None:
    async with started(DEFAULT) as it:
        name = await it.busy()
        inside = below(broker())
        kill(broker())
        assert (await finished(it.client, name)).reply["content"]["status"] == "error"
        await it.dies()
        await gone(*inside)
        assert (await it.starts_again()).reply["content"]["status"] == "ok"


# -- the process of its own ------------------------------------------------------------------------


def own_process() -> psutil.Process:
    """The one `python -m sbx.jupyter` below this one."""
    (found,) = [one for one in children(psutil.Process()) if "sbx.jupyter" in one.cmdline()]
    return found


async def test_the_own_process_killed_in_a_cell_all_inside_dies_and_another_serves(
    swept: None,
) -> None:
    async with started(STANDALONE) as it:
        await it.busy()
        itself = own_process()
        inside = below(itself)
        assert len(inside) >= 4  # a broker, a monitor, PID 1 and the kernel
        kill(itself)
        await gone(*inside)
        await it.dies()
        assert (await it.starts_again()).reply["content"]["status"] == "ok"


@pytest.mark.full_tier
async def test_the_jail_of_an_own_process_killed_the_process_ends() -> None:
    """For that is what its parent watches."""
    async with started(STANDALONE) as it:
        name = await it.busy()
        itself = own_process()
        inside = below(itself)
        kill(its_jail(broker(itself)).supervisor)
        assert (await finished(it.client, name)).reply["content"]["status"] == "error"
        await it.dies()
        await gone(*inside)


@pytest.mark.full_tier
async def test_an_own_process_told_to_end_in_a_cell_leaves_nothing() -> None:
    async with started(STANDALONE) as it:
        await it.busy()
        itself = own_process()
        inside = below(itself)
        itself.send_signal(signal.SIGTERM)
        await it.dies()
        await gone(*inside)


# -- whoever started it ----------------------------------------------------------------------------


@pytest.fixture
async def swept() -> AsyncIterator[None]:
    """What is left of a program that was killed, the next runtime sweeps."""
    yield
    async with Runtime():
        pass


def starting(kernel: str, transport: str, file: Path) -> "subprocess.Popen[str]":
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kernel, transport, str(file)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "busy\n"
    return program


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Of a connection file; paths of sockets are short."""
    short = Path(f"/tmp/{os.getpid()}-{tmp_path.name[-8:]}")
    short.mkdir(mode=0o700)
    yield short / "c.json"
    for left in short.iterdir():
        left.unlink()
    short.rmdir()


@pytest.mark.parametrize("kernel", rows([DEFAULT, STANDALONE], ci_tier=[STANDALONE]))
async def test_whoever_started_it_killed_in_a_cell_all_dies_and_the_same_place_serves_again(
    swept: None, place: Path, kernel: str
) -> None:
    """By what it left: a connection file, and the files of sockets that nobody listens at."""
    for _ in range(2):
        program = starting(kernel, "ipc", place)
        try:
            under = below(psutil.Process(program.pid))
            assert len(under) >= 4
            program.kill()
            program.wait()
            await gone(*under)
        finally:
            program.kill()
            program.communicate()


@pytest.mark.full_tier
async def test_parent_killed_between_two_looks_is_noticed_by_an_own_process(
    swept: None, place: Path
) -> None:
    """It has stopped when its parent goes: neither a signal nor a look at a number tells it."""
    program = starting(STANDALONE, "tcp", place)
    try:
        under = below(psutil.Process(program.pid))
        (itself,) = children(psutil.Process(program.pid))
        itself.send_signal(signal.SIGSTOP)
        await until(lambda: itself.status() == psutil.STATUS_STOPPED)
        program.kill()
        program.wait()
        itself.send_signal(signal.SIGCONT)
        await gone(*under)
    finally:
        program.kill()
        program.communicate()
