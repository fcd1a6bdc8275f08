"""The memory watcher reads the accounts of a jail in a thread, and closes them afterwards."""

import asyncio
import os
import threading
from typing import cast

from sbx.kernels.kernel import Kernel
from sbx.kernels.memory_watcher import Watcher

PATIENCE_S = 30.0


class Accounts:
    """Accounts that a reader has in use until `go_on`."""

    def __init__(self) -> None:
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.closed = asyncio.Event()

    def system_v(self) -> int:
        self.reading.set()
        assert self.go_on.wait(PATIENCE_S)
        assert not self.closed.is_set()
        return 0

    def sockets(self) -> int:
        return 0

    def close(self) -> None:
        self.closed.set()


class WatchedKernel:
    """A busy kernel whose jail has one process: this one."""

    alive = busy = True

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.jail = self

    def processes(self) -> list[int]:
        return [os.getpid()]

    async def accounts(self) -> Accounts:
        return self._accounts


async def test_accounts_are_closed_after_the_last_look() -> None:
    """`close` cancelled the wait for the thread, and closed the files that it read: their numbers
    could be those of other files by then."""
    accounts = Accounts()

    kernel = WatchedKernel(accounts)
    watcher = Watcher(1 << 40, tasks_max=10, descriptors=False)
    watcher.watch(cast("Kernel", kernel))
    assert await asyncio.to_thread(accounts.reading.wait, PATIENCE_S)
    watcher.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not accounts.closed.is_set()
    accounts.go_on.set()
    await asyncio.wait_for(accounts.closed.wait(), PATIENCE_S)
