"""A bridge with a client at one end of it and, at the other, a kernel that is the test's own.

    async with bridged() as it:                 it.bridge, and what its kernel says by it.inside
    async with client_of(it.connection) as kc:  Jupyter's own client, with all channels open
    told = await execute(kc, "code")            its reply, and what was published for it

A jailed process would need nothing else than its socket to say what `Impostor` says; without the
jail it takes milliseconds. Every message that a client is told here is checked against the schema
that Jupyter tests kernels with.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import zmq
from jsonschema import ValidationError
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_kernel_test.msgspec_v5 import schema_fragments, validate_message

from sbx.guest import frames as guest
from sbx.isolation.broker.jail import Jail, JailExit
from sbx.jupyter.connection import ConnectionInfo
from sbx.jupyter.notebook import Bridge
from sbx.kernels.kernel import Kernel
from sbx.policy import load
from sbx.runtime.files.disk_limit import DiskLimit
from sbx.runtime.run.context import Context

PATIENCE_S = 60.0
KEY = b"0123456789abcdef0123456789abcdef"
Message = dict[str, Any]


# -- the inside ------------------------------------------------------------------------------------


class _Lost:
    """A jail whose processes are the test's."""

    zygote = None
    masked_places = ()
    name = "impostor"
    pid: int | None = None

    def __init__(self) -> None:
        self.control, self.supervisor = socket.socketpair()
        self.kernel, self.cells = socket.socketpair()
        self.gone = False

    def make_receipt(self, *_: Any, **__: Any) -> None:
        """Return no receipt: Linux has no facts about this jail."""

    def walls(self) -> dict[str, Any]:
        return {}

    async def inspect(self, *, fresh: bool = False) -> dict[str, Any]:
        return {}

    def processes(self) -> list[int]:
        return []

    async def counters(self) -> JailExit:
        return JailExit()

    async def end(self) -> JailExit:
        return JailExit()

    async def kill(self) -> JailExit:
        self.gone = True
        for one in (self.supervisor, self.cells):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return JailExit()

    def close(self) -> None:
        """Its sockets are its kernel's by now."""


class Impostor:
    """The kernel's end of the socket. What it says is said as it is."""

    def __init__(self) -> None:
        self._jails: list[_Lost] = []
        self._reader = guest.FrameReader()
        self._frames: list[guest.RawFrame] = []

    @property
    def sock(self) -> socket.socket:
        return self._jails[-1].cells

    @property
    def killed(self) -> bool:
        """Whether the host ended the kernel that is there now."""
        return self._jails[-1].gone

    async def start(self, _name: str, _opened: Any) -> Kernel:
        """What a context starts its kernels by."""
        jail = _Lost()
        self._jails.append(jail)
        self._reader, self._frames = guest.FrameReader(), []
        kernel = await Kernel.attach(cast("Jail", jail))
        jail.supervisor.sendall(guest.encode("ready", {"landlock": 7}))
        jail.cells.sendall(guest.encode("ready", {"python": "3.11.2", "ipython": "9.0.0"}))
        await kernel.ready(PATIENCE_S)
        return kernel

    async def asked(self, kind: str | None = "execute_request") -> guest.RawFrame:
        """The next request, of this kind; others before it are passed over."""
        loop = asyncio.get_running_loop()
        self.sock.setblocking(False)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self._frames:
                    if kind in ((frame := self._frames.pop(0)).type, None):
                        return frame
                received = await loop.sock_recv(self.sock, 1 << 16)
                assert received, "the host hung up"
                self._frames += self._reader.feed(received)

    async def say(self, kind: str, content: Any, to: str | None = None) -> None:
        await self.pour(guest.encode(kind, content, to))

    async def pour(self, data: bytes | Callable[[], bytes], times: int = 1) -> int:
        """Send it so often, as long as somebody takes it; how often that was."""
        sock, taken = self.sock.dup(), 0

        def send() -> None:
            nonlocal taken
            with suppress(OSError), sock:
                sock.settimeout(PATIENCE_S)
                for _ in range(times):
                    sock.sendall(data if isinstance(data, bytes) else data())
                    taken += 1

        await asyncio.to_thread(send)
        return taken

    async def answer(self, status: str = "ok", **more: Any) -> None:
        """Take the next cell, and end it at once."""
        frame = await self.asked()
        await self.say(
            "execute_reply", {"status": status, "execution_count": 1, **more}, to=frame.id
        )

    def close(self) -> None:
        for jail in self._jails:
            jail.supervisor.close()
            jail.cells.close()


@dataclass(frozen=True, slots=True)
class Bridged:
    bridge: Bridge
    inside: Impostor
    exits: list[int]  # what the bridge's owner was told

    @property
    def connection(self) -> ConnectionInfo:
        return self.bridge.connection


@asynccontextmanager
async def bridged(*, output_max: int | None = None, **asked: Any) -> AsyncIterator[Bridged]:
    """A bridge that serves an impostor."""
    rules = load("default")
    if output_max is not None:
        limits = rules.limits.model_copy(update={"output_max": output_max})
        rules = rules.model_copy(update={"limits": limits})
    inside, exits = Impostor(), list[int]()

    async def opened() -> Any:
        return SimpleNamespace(measured=None, has_quota=False, quarantine=None, host_directory=None)

    context = Context(
        "default", "default", rules, opened, inside.start, 1.0, disk=DiskLimit(rules.limits)
    )
    bridge = await Bridge.bind(ConnectionInfo(**{"key": KEY, **asked}))
    try:
        await bridge.start(context, exits.append)
        yield Bridged(bridge, inside, exits)
    finally:
        await bridge.close()
        await context.close()
        inside.close()


# -- clients ---------------------------------------------------------------------------------------


def info_of(connection: ConnectionInfo) -> dict[str, Any]:
    """As a connection file says it."""
    ports = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
    return {
        "ip": connection.ip,
        "transport": connection.transport,
        "key": connection.key.decode(),
        "signature_scheme": connection.signature_scheme,
        **{name: getattr(connection, name) for name in ports},
    }


@asynccontextmanager
async def client_of(connection: ConnectionInfo, **other: Any) -> AsyncIterator[AsyncKernelClient]:
    """Jupyter's own client; `other` replaces what it is told of the connection."""
    kc = AsyncKernelClient()
    kc.load_connection_info(cast("Any", {**info_of(connection), **other}))
    kc.start_channels(hb=False)
    try:
        await _connected(kc)
        yield kc
    finally:
        kc.stop_channels()
        kc.context.destroy(linger=0)


async def _connected(kc: AsyncKernelClient) -> None:
    """Until what is published arrives: a subscription takes a moment."""
    if kc.session.key != KEY:
        return  # nobody answers this one
    async with asyncio.timeout(PATIENCE_S):
        while True:
            name = kc.kernel_info()
            await reply_to(kc, name)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    while (await kc.get_iopub_msg())["parent_header"].get("msg_id") != name:
                        pass
                    return


@dataclass
class CellMessages:
    reply: Message
    published: list[Message] = field(default_factory=list)

    def contents(self, kind: str) -> list[dict[str, Any]]:
        return [one["content"] for one in self.published if one["msg_type"] == kind]

    @property
    def stdout(self) -> str:
        return "".join(one["text"] for one in self.contents("stream") if one["name"] == "stdout")


async def execute(kc: AsyncKernelClient, code: str, **options: Any) -> CellMessages:
    """A cell to its end: what is published until it is idle, and the reply."""
    return await finished(kc, kc.execute(code, **{"allow_stdin": False, **options}))


async def finished(kc: AsyncKernelClient, name: str) -> CellMessages:
    """Of a request that was sent: everything up to its end."""
    reply = await reply_to(kc, name)
    reported = CellMessages(reply)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = checked(await kc.get_iopub_msg())
            if message["parent_header"].get("msg_id") != name:
                continue
            reported.published.append(message)
            if message["content"].get("execution_state") == "idle":
                return reported


async def reply_to(kc: AsyncKernelClient, name: str, *, on: str = "shell") -> Message:
    channel = getattr(kc, f"{on}_channel")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = checked(await channel.get_msg())
            if message["parent_header"].get("msg_id") == name:
                return message


def checked(message: Message) -> Message:
    """Valid by Jupyter's own schema, as far as that knows its type. MIME types are the user's."""
    if message["msg_type"] not in schema_fragments or message["content"].get("status") == "aborted":
        return message
    reported = dict(message)
    if isinstance(reported["content"].get("data"), dict):
        reported["content"] = {**reported["content"], "data": {}}
    try:
        validate_message(reported)
    except ValidationError as error:
        raise AssertionError(f"{message['msg_type']}: {error.message}") from None
    return message


class Raw:
    """A client that says what it likes: bytes on a socket of ZeroMQ's."""

    def __init__(self, connection: ConnectionInfo, channel: str, kind: int, **options: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(url_of(connection, channel))

    def __enter__(self) -> zmq.Socket[bytes]:
        return self.socket

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def url_of(connection: ConnectionInfo, channel: str) -> str:
    port = getattr(connection, f"{channel}_port")
    between = ":" if connection.transport == "tcp" else "-"
    return f"{connection.transport}://{connection.ip}{between}{port}"


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110  # it is linux's, or another thread's
            await asyncio.sleep(0.005)


def greeted(connection: ConnectionInfo, channel: str) -> socket.socket:
    """A plain connection on which ZeroMQ takes messages from now on: by ZMTP 3.0, as a DEALER."""
    sock = socket.create_connection((connection.ip, connection.port(channel)))
    signature = b"\xff" + bytes(8) + b"\x7f"
    sock.sendall(signature + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    kind = b"XSUB" if channel == "iopub" else b"DEALER"
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return sock


@contextmanager
def never_reading(connection: ConnectionInfo) -> Iterator[None]:
    """Somebody, without a key, who subscribes to everything and reads nothing."""
    with Raw(connection, "iopub", zmq.SUB, rcvhwm=1, rcvbuf=4096) as sub:
        sub.subscribe(b"")
        yield
