"""Which uid of the host the broker gives to a sandbox."""

import socket
from collections.abc import Iterator
from typing import cast

import pytest

from sbx.errors import Unavailable
from sbx.isolation.broker.sandboxes import BrokerSandbox
from sbx.isolation.broker.server import BrokerServer
from sbx.isolation.broker.spawn import Started
from sbx.isolation.broker.zygotes import ZygoteProcess
from sbx.isolation.cgroups import SandboxGroup

FIRST = 1_900_000_000


@pytest.fixture
def broker() -> Iterator[BrokerServer]:
    ours, its = socket.socketpair()
    with ours, its:
        broker = BrokerServer(its)
        broker._sandboxes.uids = range(FIRST, FIRST + 3)
        yield broker
        broker._loop.close()


def test_no_sandbox_gets_the_uid_of_a_zygote_or_of_another_sandbox(broker: BrokerServer) -> None:
    """Linux would let it signal the processes of that zygote, and of all jails under way there."""
    with socket.socket() as orders:
        zygote = ZygoteProcess("z", 1, FIRST + 1, orders, Started(0, -1, -1, -1))
        broker._zygotes.by_name["z"] = zygote
        group = cast("SandboxGroup", None)
        broker._sandboxes.by_name["one"] = BrokerSandbox(group, (FIRST, FIRST))
        for _ in range(32):  # it is drawn by chance
            assert broker._sandboxes.free_uid(broker._zygotes.uids) == FIRST + 2
        broker._sandboxes.by_name["two"] = BrokerSandbox(group, (FIRST + 2, FIRST + 2))
        with pytest.raises(Unavailable, match="every host uid"):
            broker._sandboxes.free_uid(broker._zygotes.uids)
