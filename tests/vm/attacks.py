"""Attacks a live `sbx serve` by every resource, beside an innocent sandbox, under cgroup v2.

    python tests/vm/attacks.py [NAME ...]           a service of its own; only the attacks named
    python tests/vm/attacks.py --socket PATH [...]  one that runs, as a unit of systemd for instance
    python tests/vm/attacks.py --embedded [...]     no service: a runtime in this program

To be run like `end_to_end.py`, in the same places, by a Python into which sbx is installed. As root
a service needs Landlock, without which it does not serve; `--embedded` does not. Each attack (see
bench/attacks.py) has to end as it should, the innocent sandbox has to answer every cell meanwhile
and keep its state, and nothing of the attack may be left: no process, no control group. How much
slower the neighbour became is printed and not judged: an emulated machine, or one of a single CPU,
tells nothing about real ones. `SBX_SLOWER` (4) is how many times the usual time everything is
given. The exit status is 1 if one failed.
"""

import asyncio
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from bench.attacks import ATTACKS, MARK, Attack  # noqa: E402
from sbx import AsyncSandbox, Runtime, Settings  # noqa: E402
from sbx.client import Client, RemoteSandbox  # noqa: E402
from sbx.errors import SbxError  # noqa: E402
from sbx.linux import landlock  # noqa: E402
from sbx.protocol.receipt import Receipt  # noqa: E402

Box = AsyncSandbox | RemoteSandbox
Create = Callable[[dict[str, Any]], Awaitable[Any]]

CGROUPS = Path("/sys/fs/cgroup")
SLOWER = float(os.environ.get("SBX_SLOWER", "4"))
GONE_S = 60.0
POLICY = "attacked"


def write_policy(directory: Path) -> None:
    """`default`, and without Landlock where there is none to be had."""
    directory.mkdir()
    text = 'schema = 1\nextends = "default"\n'
    if not landlock.supported():
        text += '[walls]\nlandlock = "best-effort"\n'
    (directory / f"{POLICY}.toml").write_text(text)


@asynccontextmanager
async def served() -> AsyncIterator[Path]:
    """The socket of a service of our own."""
    with tempfile.TemporaryDirectory(prefix="attacked-", dir="/var/tmp") as top:
        os.chmod(top, 0o755)  # as root it serves under another user
        policies, socket = Path(top, "policies"), Path(top, "run", "sbx.sock")
        write_policy(policies)
        words = ["--socket", socket, "--data-dir", f"{top}/data", "--policies", policies]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sbx", "serve", *map(str, words)),
            env={**os.environ, "PYTHONPATH": str(PROJECT), "SBX_LOG_LEVEL": "error"},
            cwd=top,
        )
        try:
            yield socket
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), GONE_S)


async def ready(client: Client) -> None:
    async with asyncio.timeout(GONE_S * 2):
        while True:
            try:
                await client.health()
                return
            except SbxError:
                await asyncio.sleep(0.2)


async def cells(innocent: Box, over: asyncio.Event) -> list[float]:
    """How long each cell took, in ms, until it is over; every one has to be answered, in order."""
    took: list[float] = []
    last: int | None = None
    while not took or not over.is_set():
        begun = time.perf_counter()
        run = await innocent.run("answered += 1; answered")
        took.append((time.perf_counter() - begun) * 1000)
        assert (run.ok, run.state_lost) == (True, False), run
        assert last is None or int(run.result or 0) == last + 1, run
        last = int(run.result or 0)
    return took


async def quiet(innocent: Box) -> list[float]:
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, over.set)
    return await cells(innocent, over)


def left(sandbox: str) -> list[str]:
    """Processes and control groups of an attack."""
    found = [str(path) for path in CGROUPS.rglob(f"box-{sandbox}")]
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == MARK:
                found.append(f"process {comm.parent.name}")
        except OSError:
            continue
    return found


async def receipt_of(box: Box) -> Receipt:
    found = await box.start() if isinstance(box, AsyncSandbox) else await box.read_receipt()
    assert found is not None
    return found


async def struck(create: Create, innocent: Box, attack: Attack) -> str:
    """What is worth a line. Raises AssertionError for whatever is not as it should be."""
    before = await quiet(innocent)
    over = asyncio.Event()
    async with await create({"limits": dict(attack.narrower)}) as box:
        await box.run("'a kernel of its own'")
        means = {wall["name"]: wall["means"] for wall in (await receipt_of(box)).walls}
        assert means["memory"] == means["tasks"] == means["cpu"] == "cgroup v2", means
        answering = asyncio.create_task(cells(innocent, over))
        try:
            ended = await attack.strike(box, slower=SLOWER)
        finally:
            over.set()
            during = await answering
        assert ended in attack.ends, ended
        again = await box.run("6 * 7")
        assert again.result == "42", again
    end = time.monotonic() + GONE_S
    while found := left(box.id):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.1)
    usual = median(before)
    return (
        f"{ended}; the neighbour answered all of {len(during)} cells, in"
        f" {median(during) / usual:.1f} times its quiet {usual:.1f} ms,"
        f" the slowest in {max(during):.0f} ms"
    )


async def strike_all(create: Create, names: list[str]) -> int:
    print(f"uid {os.getuid()}, linux {platform.release()}, {os.cpu_count()} CPUs", flush=True)
    assert (CGROUPS / "cgroup.controllers").exists(), "this host has no cgroup v2"
    failed = []
    async with await create({}) as innocent:
        await innocent.run("answered = 0")
        for attack in ATTACKS:
            if names and not any(part in attack.name for part in names):
                continue
            begun = time.monotonic()
            try:
                figures, verdict = await struck(create, innocent, attack), "ok    "
            except Exception:  # noqa: BLE001  # the next one is to be run whatever this one found
                figures, verdict = traceback.format_exc(), "FAILED"
                failed.append(attack.name)
            took = time.monotonic() - begun
            print(f"{verdict} {attack.name} ({took:.1f} s): {figures}", flush=True)
    print(f"{len(failed)} failed: {failed}" if failed else "all is well")
    return 1 if failed else 0


async def strike_at(socket: Path, names: list[str]) -> int:
    async with Client(socket) as client:
        await ready(client)
        return await strike_all(lambda narrower: client.create(POLICY, narrower=narrower), names)


async def strike_within(names: list[str]) -> int:
    settings = Settings(start_timeout=float(os.environ.get("SBX_START_TIMEOUT", "120")))
    with tempfile.TemporaryDirectory() as top:
        write_policy(Path(top, "policies"))
        policy = Path(top, "policies", f"{POLICY}.toml")
        async with Runtime(settings) as runtime:
            return await strike_all(
                lambda narrower: runtime.create(policy, narrower=narrower), names
            )


async def main(words: list[str]) -> int:
    match words:
        case ["--socket", path, *names]:
            return await strike_at(Path(path), names)
        case ["--embedded", *names]:
            return await strike_within(names)
        case names:
            async with served() as socket:
                return await strike_at(socket, names)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
