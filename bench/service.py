"""The service, through our client on its Unix socket, both in processes of their own."""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import baseline, paths, processes
from bench.at_once import at_once
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn, percentile
from bench.serving import served, service_pid, temporary_directory
from sbx.client import Client, RemoteSandbox

_WARM_UP = 20
_FILE_BYTES = 256 << 20
_CLIENTS = 100
_STORED = 10_000
_AT_ONCE = 50


async def _http_cell(rounds: int, progress: Progress) -> Samples:
    async with (
        served() as client,
        await client.create(paths.DATA_SCIENCE.name) as box,
        baseline.ipykernel() as kernel,
    ):
        for _ in range(_WARM_UP):
            await _cell_ms(box)
            await kernel.cell_ms()
        measured, compared = await in_turn(
            rounds, lambda: _cell_ms(box), kernel.cell_ms, progress, every=10
        )
    return Samples(measured, compared, "ipykernel by jupyter_client, 1+1 until idle")


async def _cell_ms(box: RemoteSandbox) -> float:
    began = time.perf_counter()
    run = await box.run("1+1")
    ended = time.perf_counter()
    if run.result != "2":
        raise NotMeasured(f"1+1 gave {run}")
    return (ended - began) * 1000


async def _http_create(rounds: int, progress: Progress) -> Samples:
    """From the request for a sandbox to the answer of its first cell, by a kernel of the pool."""
    async with served() as client:

        async def create_ms() -> float:
            await _idle(client)
            began = time.perf_counter()
            box = await client.create(paths.DATA_SCIENCE.name)
            run = await box.run("1+1")
            ended = time.perf_counter()
            if run.result != "2":
                raise NotMeasured(f"1+1 gave {run}")
            paths.came_by(await box.read_receipt(), "pool")
            await box.close()
            return (ended - began) * 1000

        async with await client.create(paths.DATA_SCIENCE.name) as first:
            await first.run("1+1")  # with it the policy's pool begins to fill
        measured, compared = await in_turn(
            rounds,
            create_ms,
            lambda: baseline.start_ms(paths.DATA_SCIENCE.preload),
            progress,
            every=6,
        )
    return Samples(measured, compared, "ipykernel by jupyter_client, started, pandas imported")


async def _idle(client: Client) -> None:
    """Wait until a kernel is kept ready; who asks before that is told by its receipt."""
    await client.health()
    await asyncio.sleep(0.5)


async def _upload(rounds: int, progress: Progress) -> Samples:
    return await _copied(rounds, progress, up=True)


async def _download(rounds: int, progress: Progress) -> Samples:
    return await _copied(rounds, progress, up=False)


async def _copied(rounds: int, progress: Progress, *, up: bool) -> Samples:
    with tempfile.TemporaryDirectory(prefix="sbx-bench-", dir="/var/tmp") as directory:
        source, target = Path(directory, "source.bin"), Path(directory, "target.bin")
        await asyncio.to_thread(_fill, source)
        async with served() as client, await client.create() as box:
            await box.files.upload(source, "file.bin")

            async def copy_ms() -> float:
                began = time.perf_counter()
                if up:
                    await box.files.upload(source, "file.bin")
                else:
                    await box.files.download("file.bin", target)
                ended = time.perf_counter()
                if not up and os.path.getsize(target) != _FILE_BYTES:  # noqa: ASYNC240  # not timed
                    raise NotMeasured("the download has another size than the file")
                return (ended - began) * 1000

            async def cp_ms() -> float:
                began = time.perf_counter()
                await asyncio.to_thread(_cp, source, Path(directory, "copy.bin"))
                return (time.perf_counter() - began) * 1000

            measured, compared = await in_turn(rounds, copy_ms, cp_ms, progress)
    return Samples(measured, compared, f"cp of the same {_FILE_BYTES >> 20} MiB, and fsync")


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        for _ in range(_FILE_BYTES >> 20):
            file.write(os.urandom(1 << 20))


def _cp(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())  # as an upload is synced before it is told


async def _http_throughput(seconds: int, progress: Progress) -> Samples:
    """The cells of a hundred clients in each of so many seconds. Each has a sandbox of its own, and
    sends its next cell as soon as it has the reply."""
    times, rates = list[float](), list[float]()
    with temporary_directory() as top:
        async with served(top=top) as first, baseline.ipykernel() as kernel:
            over = asyncio.Event()

            async def one() -> None:
                async with Client(first.address) as client, await client.create() as box:
                    await box.run("1+1")
                    running.release()
                    await ready.wait()
                    while not over.is_set():
                        times.append(await _cell_ms(box))

            running, ready = asyncio.Semaphore(0), asyncio.Event()
            clients = [asyncio.create_task(one()) for _ in range(_CLIENTS)]
            try:
                for _ in clients:
                    waiting = asyncio.create_task(running.acquire())
                    await asyncio.wait([waiting, *clients], return_when=asyncio.FIRST_COMPLETED)
                    if not waiting.done():
                        waiting.cancel()
                        raise NotMeasured("a client ended before all had begun")
                pids = {"the service": service_pid(top), "the clients": os.getpid()}
                before = {name: processes.cpu_s(pid) or 0 for name, pid in pids.items()}
                ready.set()
                for number in range(seconds):
                    began, done = time.perf_counter(), len(times)
                    await asyncio.sleep(1)
                    rates.append((len(times) - done) / (time.perf_counter() - began))
                    progress(number + 1, seconds)
                also = {
                    f"CPU of {name} for a cell": ((processes.cpu_s(pid) or 0) - before[name])
                    / len(times)
                    * 1000
                    for name, pid in pids.items()
                }
                over.set()
                await asyncio.gather(*clients)
            finally:
                for task in clients:
                    task.cancel()
                await asyncio.wait(clients)
            compared = [1000 / await kernel.cell_ms() for _ in range(seconds)]
    also |= {"cell p50": median(times), "cell p99": percentile(times, 99)}
    return Samples(rates, compared, "one ipykernel by jupyter_client, alone", also, also_unit="ms")


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two services that were started again: one with 10,000 stored sandboxes, one without any."""

    client: Client
    empty: Client
    started_ms: float
    empty_ms: float
    memory_mib: float
    empty_mib: float


@asynccontextmanager
async def _with_stored() -> AsyncIterator[_Pair]:
    more = {"SBX_SANDBOXES_MAX": str(_STORED), "SBX_SANDBOXES_PER_OWNER": str(_STORED)}
    with temporary_directory() as top, temporary_directory() as without:
        async with served(top=top, **more) as client:
            await at_once(_STORED, client.create, most=_AT_ONCE)
        async with served(top=without, **more):
            pass
        began = time.perf_counter()
        async with served(top=top, **more) as client:
            between = time.perf_counter()
            async with served(top=without, **more) as empty:
                ended = time.perf_counter()
                yield _Pair(
                    client,
                    empty,
                    (between - began) * 1000,
                    (ended - between) * 1000,
                    processes.pss_mib([service_pid(top)]),
                    processes.pss_mib([service_pid(without)]),
                )


async def _list_10k(rounds: int, progress: Progress) -> Samples:
    async with _with_stored() as pair:

        async def page_ms(of: Client) -> float:
            asked = time.perf_counter()
            await of.sandboxes()
            return (time.perf_counter() - asked) * 1000

        measured, compared = await in_turn(
            rounds, lambda: page_ms(pair.client), lambda: page_ms(pair.empty), progress
        )
        also = {"start of the service": pair.started_ms, "of one without": pair.empty_ms}
    return Samples(measured, compared, "a service without sandboxes", also)


async def _memory_10k(_: int, progress: Progress) -> Samples:
    async with _with_stored() as pair:
        progress(1, 1)
        return Samples([pair.memory_mib], [pair.empty_mib], "a service without sandboxes")


BENCHES = (
    Bench("http_cell", "ms", 1.2, _http_cell, 1000, 300, usual=baseline.CELL_MS),
    Bench("http_create", "ms", 6.0, _http_create, 60, 10, usual=baseline.KERNEL_WITH_PANDAS_MS),
    Bench("upload", "ms", None, _upload, rounds=7, quick_rounds=2, ratio_max=3.0),
    Bench("download", "ms", None, _download, rounds=7, quick_rounds=2, ratio_max=1.5),
    Bench("list_10k", "ms", 20.0, _list_10k, rounds=100),
    Bench("memory_10k", "MiB", 150.0, _memory_10k, rounds=1),
    Bench("http_throughput", "/s", 800.0, _http_throughput, rounds=30, better="higher"),
)
