"""PID 1's socket, held by somebody else: whatever it says ends this kernel, or costs nothing.

The runtime's own code on a real socket; of the jail there is only what it would be asked to end.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import psutil
import pytest

from sbx.guest import frames as guest
from sbx.isolation.broker.jail import Jail, JailExit
from sbx.kernels import channel as channels
from sbx.kernels import frames
from sbx.kernels.channel import Channel, ChannelClosed
from sbx.kernels.command import Command, KernelDied, TerminalCommand
from sbx.kernels.kernel import Kernel


class Lost:
    """A jail whose processes are somebody else's."""

    zygote = None
    gone = False

    def __init__(self) -> None:
        self.control, self.supervisor = socket.socketpair()
        self.kernel, self.other = socket.socketpair()
        self.killed = asyncio.Event()

    async def kill(self) -> JailExit:
        self.killed.set()
        return JailExit()

    def close(self) -> None:
        """Its sockets are its kernel's by now."""


@asynccontextmanager
async def held() -> AsyncIterator[tuple[Kernel, Lost]]:
    lost = Lost()
    kernel = await Kernel.attach(cast("Jail", lost))
    kernel._listening = asyncio.create_task(kernel._listen())
    try:
        yield kernel, lost
    finally:
        kernel.close()
        with suppress(asyncio.CancelledError):
            kernel._listening.cancel()
            await kernel._listening
        lost.supervisor.close()
        lost.other.close()


async def pour(sock: socket.socket, data: bytes) -> None:
    """Send it without holding the loop, until it is taken or nobody takes it any more."""

    def send() -> None:
        with suppress(OSError):
            sock.settimeout(60)
            sock.sendall(data)

    await asyncio.to_thread(send)


async def ended(lost: Lost) -> None:
    async with asyncio.timeout(60):
        await lost.killed.wait()


GARBAGE = {
    "garbage": b"\x00\x00\x00\x04}{}{",
    "beyond all bounds": b"\xff\xff\xff\xff",
    "a kernel's frame": guest.encode("stream", {"name": "stdout", "text": ""}),
    "no base64": guest.encode("tty", {"data": "\u2028"}, "1"),
    "a number without end": b"\x00\x00\x14\x00"
    + b'{"type":"fed","id":"1","content":{"open":true,"bytes":'.ljust(0x1400 - 2, b"1")
    + b"}}",
    "ready, again": guest.encode("ready", {"landlock": 7}),
    "refused, late": guest.encode("refused", {"layer": "x", "message": "x", "errno": 1}),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_what_no_supervisor_of_ours_says_ends_it_with_a_cause(what: str) -> None:
    async with held() as (kernel, lost):
        command = await kernel.spawn(["true"], "/", {})
        await pour(lost.supervisor, GARBAGE[what])
        await ended(lost)
        with pytest.raises(KernelDied):
            await command.next()
        assert not kernel.alive
        assert kernel.cut_off


async def spawned(kernel: Kernel, kind: type[Command]) -> Command:
    if kind is TerminalCommand:
        return await kernel.spawn_at_terminal(["sh"], "/", {}, 24, 80)
    return await kernel.spawn(["true"], "/", {}, window=1 << 16)


@pytest.mark.parametrize("kind", [Command, TerminalCommand])
async def test_more_than_the_window_ends_it_while_little_is_held(kind: type[Command]) -> None:
    """Of a command whose reader has gone to sleep."""
    async with held() as (kernel, lost):
        command = await spawned(kernel, kind)
        piece = (
            guest.encode("tty", {"data": "eHh4" * 20_000}, command._name)
            if kind is TerminalCommand
            else guest.encode("output", {"name": "stdout", "text": "x" * 60_000}, command._name)
        )
        before = psutil.Process().memory_info().rss
        flood = asyncio.create_task(pour(lost.supervisor, piece * 2000))
        await ended(lost)
        assert kernel.cut_off == "a command wrote more than its window allows"
        assert psutil.Process().memory_info().rss - before < 192 << 20  # 120 MiB are the flood
        lost.supervisor.shutdown(socket.SHUT_RDWR)
        await flood


@pytest.mark.parametrize("kind", [Command, TerminalCommand])
async def test_a_command_that_speaks_as_another_kind_ends_it(kind: type[Command]) -> None:
    async with held() as (kernel, lost):
        command = await spawned(kernel, kind)
        other = (
            guest.encode("output", {"name": "stdout", "text": "x"}, command._name)
            if kind is TerminalCommand
            else guest.encode("tty", {"data": "eA=="}, command._name)
        )
        await pour(lost.supervisor, other)
        await ended(lost)
        assert kernel.cut_off == "a command sent a frame of another kind of command"


async def test_words_about_commands_that_nobody_started_are_dropped() -> None:
    async with held() as (kernel, lost):
        command = await kernel.spawn(["true"], "/", {})
        for name in ("0", "999", "../../x", "\u2028", "9" * 4000):
            for kind, content in (
                ("output", {"name": "stdout", "text": "x"}),
                ("fed", {"bytes": 1, "open": False}),
                ("exited", {"code": 0}),
            ):
                await pour(lost.supervisor, guest.encode(kind, content, name))
        await pour(lost.supervisor, guest.encode("exited", {"code": 3}, command._name))
        async with asyncio.timeout(60):
            answer = await command.next()
        assert isinstance(answer, frames.Exited)
        assert answer.code == 3
        assert kernel.alive


async def test_a_flood_of_such_words_leaves_the_loop_to_others() -> None:
    async with held() as (_, lost):
        flood = asyncio.create_task(
            pour(lost.supervisor, guest.encode("exited", {"code": 0}, "none") * 20_000)
        )
        turns, until = 0, time.monotonic() + 1
        while time.monotonic() < until:
            await asyncio.sleep(0.001)
            turns += 1
        lost.supervisor.shutdown(socket.SHUT_RDWR)
        await flood
        assert turns > 50


async def test_what_is_fed_beyond_what_was_typed_counts_as_all_of_it() -> None:
    async with held() as (kernel, lost):
        command = await kernel.spawn(["cat"], "/", {})
        await command.write("abc")
        answer: Callable[[int], bytes] = lambda size: guest.encode(  # noqa: E731
            "fed", {"bytes": size, "open": True}, command._name
        )
        await pour(lost.supervisor, answer(2) + answer(2**62))
        async with asyncio.timeout(60):
            while command.unread:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert command.unread == 0


async def test_one_who_never_reads_is_cut_off_at_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the bound itself: without reaching it, all is kept for the one who sleeps."""
    monkeypatch.setattr(channels, "_UNREAD_MAX", 4 << 20)
    ours, theirs = socket.socketpair()
    channel = await Channel.open(ours, frames.KERNEL)
    text: dict[str, Any] = {"code": "x" * (1 << 20)}
    for _ in range(3):
        channel.post("execute_request", text)
    assert not channel.closed
    channel.post("execute_request", text)
    with pytest.raises(ChannelClosed, match="does not read"):
        channel.post("execute_request", text)
    assert channel.fault == "it does not read its input"
    channel.close()
    theirs.close()
    await asyncio.sleep(0)
