"""Changes faster than anybody reads them: what reads them leaves the others the time to live.

Once, eight watches of one sandbox that renamed without end made the cells of all others answer
twenty times slower. The row `neighbour` of bench/ has the figures.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from sbx.aio import WorkerThreads
from sbx.runtime.files.watch import _REST, _REST_MAX_S, Watches, _Watch
from sbx.workspace.tree import Tree
from sbx.workspace.watch import Watching

T = TypeVar("T")


class _Threads(WorkerThreads):
    """Remembers when each call began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, float]] = []

    async def call(self, act: Callable[[], T]) -> T:
        def timed() -> T:
            begun = time.monotonic()
            try:
                return act()
            finally:
                self.calls.append((begun, time.monotonic()))

        return await super().call(timed)


@contextmanager
def _storm(directory: Path) -> Iterator[None]:
    over = threading.Event()

    def rename() -> None:
        while not over.is_set():
            os.rename(directory / "a", directory / "b")
            os.rename(directory / "b", directory / "a")

    (directory / "a").mkdir()
    thread = threading.Thread(target=rename)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.full_tier
async def test_watches_of_a_conversation_read_in_turn_and_rest_in_between(tmp_path: Path) -> None:
    watches, threads = Watches(), _Threads()

    async def follow(tree: Tree) -> None:
        def begin() -> tuple[str, Watching]:
            return "/workspace", Watching([(tree, ())], recursive=True)

        async with aclosing(watches.follow(threads, begin)) as changes:
            async for _ in changes:
                pass

    with Tree.at(tmp_path, view="/workspace") as tree, _storm(tmp_path):
        following = [asyncio.create_task(follow(tree)) for _ in range(3)]
        async with asyncio.timeout(60):
            while len(threads.calls) < 3 + 4:  # noqa: ASYNC110  # three that begin, and some reads
                await asyncio.sleep(0.01)
        reads = threads.calls[3:]
        watches.stop()
        await asyncio.gather(*following)
    for (begun, ended), (next_begun, _) in pairwise(reads):
        assert next_begun >= ended + min(_REST_MAX_S, (_REST - 1) * (ended - begun))


async def test_a_descriptor_that_is_not_read_yet_wakes_the_loop_once(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with Tree.at(tmp_path, view="/workspace") as tree:
        watching = Watching([(tree, ())], recursive=False)
        watch = _Watch(watching)
        (tmp_path / "new").touch()
        async with asyncio.timeout(60):
            await watch.readable.wait()
            assert not loop.remove_reader(watching.fd)
            watch.arm()
            await watch.readable.wait()
        assert watching.read()
        watch.stop()
        watch.arm()
        assert not loop.remove_reader(watching.fd)
        watching.close()
