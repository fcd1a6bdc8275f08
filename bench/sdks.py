"""SDKs of other products against our own client: `1+1`, and how much longer the service takes.

    SDK ────────┐
                ├──► Tap ──► sbx serve
    our client ─┘

All go over TCP through one tap. For each call it adds up the times from the last byte of a request
to the last byte of its reply: the time of the service. The rest of a call is the client's own time.
Calls of the SDK and of our client alternate, and a row is the median of the differences of the
pairs. The SDKs run in threads, so that the tap does not wait for them.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from statistics import median
from typing import Any

from bench.samples import Bench, NotMeasured, Progress, Samples
from bench.serving import KEY, served
from sbx.client import Client

_WARM_UP = 20
_LIMIT_MS = 2.0


class Tap:
    """A relay of TCP connections that measures the time of the server."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._waits_since: float | None = None
        self._replied_at = 0.0
        self._busy_s = 0.0

    def restart(self) -> None:
        self._waits_since, self._replied_at, self._busy_s = None, 0.0, 0.0

    @property
    def server_ms(self) -> float:
        """How long the server worked since `restart`."""
        self._close_exchange()
        return self._busy_s * 1000

    def _close_exchange(self) -> None:
        if self._waits_since is not None and self._replied_at > self._waits_since:
            self._busy_s += self._replied_at - self._waits_since
            self._waits_since = None

    def _request(self) -> None:
        self._close_exchange()
        self._waits_since = time.perf_counter()

    def _reply(self) -> None:
        self._replied_at = time.perf_counter()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(
                _copied(reader, here, self._request), _copied(there, writer, self._reply)
            )
        finally:
            for each in (writer, here):
                each.close()
                with suppress(OSError):
                    await each.wait_closed()


async def _copied(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, seen: Callable[[], None]
) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            seen()
            target.write(data)
            await target.drain()
    with suppress(OSError):
        target.close()


@asynccontextmanager
async def _tapped() -> AsyncIterator[tuple[Tap, str]]:
    """A service behind a tap, and the address of the tap."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with served(listen=f"127.0.0.1:{port}"):
        tap = Tap("127.0.0.1", port)
        server = await asyncio.start_server(tap.relay, "127.0.0.1", 0)
        try:
            yield tap, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


async def _measured(
    rounds: int, progress: Progress, tap: Tap, host: str, by_sdk: Callable[[], Awaitable[str]]
) -> Samples:
    times: dict[str, list[float]] = {"sdk": [], "sdk_total": [], "own": [], "own_total": []}
    async with (
        Client(f"http://{host}", key=KEY) as client,
        await client.create("default") as box,
    ):

        async def by_own() -> str:
            return str((await box.run("1+1")).result)

        for number in range(_WARM_UP + rounds):
            for name, call in (("sdk", by_sdk), ("own", by_own)):
                tap.restart()
                began = time.perf_counter()
                result = await call()
                total = (time.perf_counter() - began) * 1000
                if result != "2":
                    raise NotMeasured(f"1+1 gave {result} by the {name}")
                if number >= _WARM_UP:
                    times[name].append(tap.server_ms)
                    times[f"{name}_total"].append(total)
            progress(max(0, number + 1 - _WARM_UP), rounds)
    pairs = zip(times["sdk"], times["own"], strict=True)
    return Samples(
        [theirs - ours for theirs, ours in pairs],
        times["own"],
        "the service's time of 1+1 by our client over TCP",
        also={name: median(values) for name, values in times.items()},
    )


async def _opensandbox(rounds: int, progress: Progress) -> Samples:
    try:
        from code_interpreter import CodeInterpreterSync
        from opensandbox import SandboxSync
        from opensandbox.config import ConnectionConfigSync
    except ImportError:
        raise NotMeasured("the packages of OpenSandbox are not installed") from None
    async with _tapped() as (tap, host):
        where: dict[str, Any] = {"domain": f"{host}/opensandbox", "api_key": KEY}
        transport = ConnectionConfigSync(**where).new_owned_transport()

        def made() -> Any:
            config = ConnectionConfigSync(**where, transport=transport)
            box = SandboxSync.create(
                "opensandbox/code-interpreter:v1.1.0",
                connection_config=config,
                entrypoint=["/opt/opensandbox/code-interpreter.sh"],
            )
            return CodeInterpreterSync.create(box)

        interpreter = await asyncio.to_thread(made)

        async def run() -> str:
            execution = await asyncio.to_thread(interpreter.codes.run, "1+1")
            return str(execution.result[0].text)

        samples = await _measured(rounds, progress, tap, host, run)
        await asyncio.to_thread(transport.close)
        return samples


async def _e2b(rounds: int, progress: Progress) -> Samples:
    try:
        from e2b_code_interpreter import Sandbox
    except ImportError:
        raise NotMeasured("the packages of E2B are not installed") from None
    async with _tapped() as (tap, host):
        url = f"http://{host}"
        key = f"e2b_{KEY.removeprefix('sk-sbx-')}"
        box = await asyncio.to_thread(
            lambda: Sandbox.create(api_key=key, api_url=url, sandbox_url=url)
        )

        async def run() -> str:
            return str((await asyncio.to_thread(box.run_code, "1+1")).text)

        return await _measured(rounds, progress, tap, host, run)


BENCHES = (
    Bench("opensandbox_run", "ms", _LIMIT_MS, _opensandbox, rounds=300, quick_rounds=60),
    Bench("e2b_run_code", "ms", _LIMIT_MS, _e2b, rounds=300, quick_rounds=60),
)
