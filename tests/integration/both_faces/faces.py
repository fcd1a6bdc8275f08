"""The two faces: a sandbox in this process, and one in a service, by the same words."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from live_app import live, short_directory

import sbx
from sbx import AsyncSandbox, Runtime, Sandbox
from sbx.blocking import Loop
from sbx.client import Client, RemoteSandbox
from sbx.protocol.runs import Event, Stdout

FACES = ("embedded", "connected")
Box = AsyncSandbox | RemoteSandbox


class Make(Protocol):
    """Makes a sandbox of the face that is tested, with the arguments that both have."""

    def __call__(
        self, policy: str = "default", *, narrower: Mapping[str, Any] | None = None
    ) -> Sandbox: ...


def says(event: Event, text: str) -> bool:
    """One print may come as two events, its text and the end of its line."""
    return isinstance(event, Stdout) and text in event.text


@contextlib.contextmanager
def service() -> Iterator[Path]:
    """The socket of a service, on a loop in a thread of its own."""
    with short_directory() as directory:
        loop = Loop("service-of-the-test")
        serving = live(directory)
        served = loop.call(serving.__aenter__())
        try:
            yield served.socket
        finally:
            loop.end(serving.__aexit__(None, None, None))


@contextlib.contextmanager
def blocking(face: str) -> Iterator[Make]:
    """How sandboxes of this face are made, synchronously."""
    try:
        if face == "embedded":
            yield Sandbox
            return
        with service() as socket:

            def connected(
                policy: str = "default", *, narrower: Mapping[str, Any] | None = None
            ) -> Sandbox:
                return Sandbox(policy, narrower=narrower, connect=socket)

            yield connected
            sbx.close()
    finally:
        sbx.close()


@contextlib.asynccontextmanager
async def asynchronous(face: str) -> AsyncIterator[Box]:
    """A sandbox of this face for asyncio."""
    if face == "embedded":
        async with Runtime() as runtime, await runtime.create() as box:
            yield box
        return
    with short_directory() as directory:
        async with (
            live(directory) as served,
            Client(served.socket) as client,
            await client.create() as box,
        ):
            yield box
