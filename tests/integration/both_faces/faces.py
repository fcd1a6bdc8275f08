"""The two faces: a sandbox in this process, and one in a service, by the same words."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from live_app import live
from places import short_directory

import sbx
from sbx import AsyncSandbox, Runtime, Sandbox
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
def blocking(face: str, socket: Path) -> Iterator[Make]:
    """How sandboxes of this face are made, synchronously; `socket` is that of a service."""

    def connected(policy: str = "default", *, narrower: Mapping[str, Any] | None = None) -> Sandbox:
        return Sandbox(policy, narrower=narrower, connect=socket)

    try:
        yield Sandbox if face == "embedded" else connected
    finally:
        sbx.close()


@contextlib.asynccontextmanager
async def asynchronous(face: str) -> AsyncIterator[Box]:
    """A sandbox of this face for asyncio, in a runtime or a service of its own."""
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
