"""What is said of a kernel that ends before it is ready."""

import asyncio
import socket
from typing import Any, cast

import pytest

from sbx.errors import Broken, CannotEnforce
from sbx.isolation.broker.jail import Jail, JailExit
from sbx.kernels import frames
from sbx.kernels.kernel import Kernel


class EndedJail:
    """A jail of which all that is left is what its processes sent."""

    zygote = None
    masked_places = ()

    def __init__(self, *, from_kernel: bytes) -> None:
        self.control, supervisor = socket.socketpair()
        self.kernel, kernel = socket.socketpair()
        kernel.sendall(from_kernel)
        for sock in (kernel, supervisor):
            sock.close()

    def walls(self) -> dict[str, Any]:
        return {}

    async def kill(self) -> JailExit:
        return await self.end()

    async def end(self) -> JailExit:
        return JailExit(stderr="it fell over")

    def close(self) -> None:
        """Its sockets are its kernel's by now."""


class LivingJail:
    """A jail whose processes hold their ends of its sockets."""

    gone = False

    def __init__(self) -> None:
        self.control, self._supervisor = socket.socketpair()
        self.kernel, self._kernel = socket.socketpair()
        self.kills = 0

    async def kill(self) -> JailExit:
        self.kills += 1
        return JailExit()

    def close(self) -> None:
        """Its sockets are its kernel's by now."""

    def end_processes(self) -> None:
        self._supervisor.close()
        self._kernel.close()


async def started(*, from_kernel: bytes) -> Kernel:
    return await Kernel.start(cast("Jail", EndedJail(from_kernel=from_kernel)), {}, 10)


async def test_the_wall_that_its_kernel_could_not_put_up_is_named() -> None:
    """Though PID 1, which waits for its kernel, has hung up without a word."""
    refusal = {"layer": "seccomp", "message": "no such call", "errno": 38}
    with pytest.raises(CannotEnforce, match="no such call") as refused:
        await started(from_kernel=frames.encode("refused", refusal))
    assert refused.value.details == {"layer": "seccomp"}


@pytest.mark.parametrize(
    "said",
    [b"", frames.encode("ready", {"python": "3.13.1", "ipython": "9.0"})],
    ids=["none", "ready"],
)
async def test_without_such_a_word_it_ended_before_it_was_ready(said: bytes) -> None:
    with pytest.raises(Broken, match="ended before it was ready: it fell over"):
        await started(from_kernel=said)


async def test_jail_is_killed_when_its_attach_is_cancelled() -> None:
    """The caller gets no kernel to kill, and the jail would live on."""
    jail = LivingJail()
    attaching = asyncio.create_task(Kernel.attach(cast("Jail", jail)))
    await asyncio.sleep(0)  # it has begun
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    assert jail.kills == 1
    jail.end_processes()
