"""The frames of all kernels of one owner: read no faster together than one kernel alone may be."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable

from sbx.kernels import frames
from sbx.kernels.channel import (
    BURST,
    UNITS_PER_S,
    Channel,
    ChannelClosed,
    FrameBudget,
    FrameBudgets,
)

FLOOD = frames.encode("clear_output", {"wait": True}) * 1000
KERNELS = 12


class Peer:
    """A channel, and the kernel at its other end."""

    def __init__(self, channel: Channel, end: socket.socket) -> None:
        self.channel = channel
        self.end = end
        self.read = 0
        self.times_held_back = 0
        held_back = channel.hold_back

        def hold_back() -> None:
            self.times_held_back += 1
            held_back()

        channel.hold_back = hold_back  # type: ignore[method-assign]

    async def flood(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                await loop.sock_sendall(self.end, FLOOD)

    async def follow(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                await self.channel.receive()
                self.read += 1

    async def answer(self) -> None:
        """One frame from the kernel to the reader."""
        self.end.sendall(FLOOD[: len(FLOOD) // 1000])
        await self.channel.receive()


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110  # of many channels, which have no event in common
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def peer(budget: FrameBudget | None) -> AsyncIterator[Peer]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    channel = await Channel.open(ours, frames.KERNEL)
    if budget is not None:
        channel.share(budget)
    try:
        yield Peer(channel, theirs)
    finally:
        channel.close()
        theirs.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def flooding(budget: FrameBudget) -> AsyncIterator[list[Peer]]:
    async with contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(peer(budget)) for _ in range(KERNELS)]
        tasks = [asyncio.create_task(work()) for one in peers for work in (one.flood, one.follow)]
        try:
            yield peers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_kernels_of_an_owner_share_one_budget() -> None:
    """A lower bound of the time, so that a slow machine fails nothing."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60), flooding(FrameBudget()) as peers:
        began = loop.time()
        await until(lambda: sum(one.read for one in peers) > 10 * BURST)
        read = sum(one.read for one in peers)
        took = loop.time() - began
        assert took > (read - 3 * BURST) / UNITS_PER_S
        await until(lambda: min(one.read for one in peers) > 0)  # each has its turn


async def test_a_quiet_kernel_is_not_held_back_with_its_neighbours() -> None:
    budget = FrameBudget()
    async with asyncio.timeout(60), flooding(budget) as peers, peer(budget) as quiet:
        await until(lambda: budget.paused_count > 0)
        for _ in range(50):
            await quiet.answer()
        assert quiet.times_held_back == 0
        assert sum(one.times_held_back for one in peers) > 0


async def test_a_channel_that_was_held_back_is_read_to_its_end() -> None:
    budget = FrameBudget()
    async with asyncio.timeout(60), peer(budget) as one:
        following = asyncio.create_task(one.follow())
        for _ in range(5):
            await asyncio.get_running_loop().sock_sendall(one.end, FLOOD)
        one.end.shutdown(socket.SHUT_WR)
        await following
        assert one.read == 5000
        assert one.times_held_back > 0
        assert budget.paused_count == 0


async def test_large_frames_and_frames_of_many_values_count_as_more() -> None:
    async with asyncio.timeout(60):
        for content in ({"text/html": "x" * (9 << 20)}, {"a/b": [0] * 100_000}):
            async with peer(FrameBudget()) as one:
                sent = frames.encode("display_data", {"data": content})
                sending = asyncio.create_task(
                    asyncio.get_running_loop().sock_sendall(one.end, sent)
                )
                await one.channel.receive()
                await sending
                assert one.times_held_back == 1


async def test_an_owner_has_one_budget_while_there_is_a_sandbox() -> None:
    budgets = FrameBudgets()
    one = budgets.of("a")
    assert budgets.of("a") is one
    assert budgets.of("b") is not one
    del one
    gc.collect()
    assert len(budgets._budgets) == 0
