"""The runtime's end of the broker's socket, where the other end is slow, ends or refuses."""

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from sbx import errors
from sbx.isolation.broker import connection, process, spawned
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.jail import Jail, JailExit
from sbx.isolation.broker.loop import BrokerLoop
from sbx.isolation.broker.process import BrokerProcess, start_broker
from sbx.isolation.broker.watchdog import Watchdog
from sbx.isolation.probe import Capabilities

UIDS = (700_000, 1_000)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# -- orders ----------------------------------------------------------------------------------------


class Far:
    """The broker's end of the socket, which the test speaks for."""

    def __init__(self) -> None:
        self.broker = BrokerClient()
        ours, self.sock = pair()
        ours.setblocking(False)
        self.broker._sock = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self.broker._receive)

    def reply(self) -> dict[str, Any]:
        packet: dict[str, Any] = json.loads(self.sock.recv(1 << 18))
        return packet


@pytest.fixture
async def far() -> AsyncIterator[Far]:
    far = Far()
    yield far
    await far.broker.close()
    far.sock.close()


async def test_order_after_the_end_of_the_broker_names_it(far: Far) -> None:
    far.sock.close()
    with pytest.raises(errors.Broken) as raised:
        await far.broker.order("ping")
    assert raised.value.code == "broker_died"


async def test_order_without_an_answer_in_time_is_silent(far: Far) -> None:
    for do, code in (("ping", "broker_silent"), ("fork", "zygote_silent")):
        with pytest.raises(errors.Unavailable) as raised:
            await far.broker.order(do, deadline_s=0.01)
        assert raised.value.code == code
        assert far.reply()["do"] == do
    far.sock.send(json.dumps({"seq": 1, "ok": {}}).encode())  # too late: no order waits for it
    waiting = asyncio.create_task(far.broker.order("ping"))
    await asyncio.sleep(0)
    seq = far.reply()["seq"]
    far.sock.send(json.dumps({"seq": seq, "ok": {"yes": 1}}).encode())
    assert await waiting == {"yes": 1}


async def test_answer_that_came_while_the_loop_was_blocked_counts(far: Far) -> None:
    waiting = asyncio.create_task(far.broker.order("fork", deadline_s=0.01))
    await asyncio.sleep(0)
    seq = far.reply()["seq"]
    for message in (
        *[{"event": "zygote_gone", "zygote": "x", "why": ""}] * 3,
        {"seq": seq, "ok": {}},
    ):
        far.sock.send(json.dumps(message).encode())
    time.sleep(0.05)  # noqa: ASYNC251  # as a program does that calls blocking code in its loop
    assert await waiting == {}


async def test_order_waits_while_the_broker_is_behind_with_reading(far: Far) -> None:
    orders = [asyncio.create_task(far.broker.order("ping", more="x" * 60_000)) for _ in range(20)]
    await asyncio.sleep(0)
    for _ in orders:
        while True:
            try:
                packet = far.sock.recv(1 << 18, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                await asyncio.sleep(0)
        far.sock.send(json.dumps({"seq": json.loads(packet)["seq"], "ok": {}}).encode())
    assert await asyncio.gather(*orders) == [{}] * 20


async def test_order_that_waits_to_be_sent_ends_with_the_broker(far: Far) -> None:
    orders = [asyncio.create_task(far.broker.order("ping", more="x" * 60_000)) for _ in range(20)]
    await asyncio.sleep(0)
    far.broker._hang_up(process.broker_died)
    for outcome in await asyncio.gather(*orders, return_exceptions=True):
        assert isinstance(outcome, errors.Broken)
        assert outcome.code == "broker_died"


async def test_descriptors_in_flight_are_waited_for_and_then_named(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux refuses to pass more descriptors than the limit of open files (ETOOMANYREFS)."""
    real, left = socket.send_fds, [errno.ETOOMANYREFS, 0]

    def send(*words: Any) -> int:
        number = left.pop(0) if left else errno.ETOOMANYREFS
        if number:
            raise OSError(number, os.strerror(number))
        return real(*words)

    monkeypatch.setattr(connection, "_IN_FLIGHT_PAUSE_S", 0.0)
    monkeypatch.setattr(socket, "send_fds", send)
    await far.broker._send(b"{}", (0,))
    assert far.reply() == {}
    monkeypatch.setattr(connection, "_IN_FLIGHT_S", -1.0)
    with pytest.raises(errors.Unavailable) as raised:
        await far.broker.order("ping")
    assert raised.value.code == "too_many_in_flight"
    left[:] = [errno.EPERM]
    with pytest.raises(PermissionError):
        await far.broker.order("ping")


async def test_charge_returns_whether_the_directory_counts(far: Far) -> None:
    charging = asyncio.create_task(far.broker.charge("/data", bytes_max=1, inodes_max=2))
    await asyncio.sleep(0)
    order = far.reply()
    seq = order.pop("seq")
    assert order == {"do": "charge", "path": "/data", "bytes_max": 1, "inodes_max": 2}
    far.sock.send(json.dumps({"seq": seq, "ok": {"charged": False}}).encode())
    assert await charging is False


async def test_closed_broker_is_closed(far: Far) -> None:
    await far.broker.close()
    with pytest.raises(errors.Closed):
        await far.broker.order("ping")
    assert isinstance(far.broker.failure, errors.Closed)


async def test_jail_without_a_sandbox_has_no_plan_and_ends_once(far: Far) -> None:
    jail = Jail(far.broker.order, "j")
    with pytest.raises(errors.Broken, match="has entered no sandbox"):
        _ = jail.plan
    first = JailExit("first")
    for end in (first, JailExit("second")):
        jail.set_ended(end)
    assert await jail.counters() == await jail.kill() == first
    assert jail.processes() == []
    assert await jail.unlinked(0) == (0, 0, 0)
    jail.close()


# -- the start -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [["false"], ["true"]])
async def test_broker_starts_without_a_scope_that_systemd_does_not_give(
    monkeypatch: pytest.MonkeyPatch, prefix: list[str]
) -> None:
    monkeypatch.setattr(spawned, "scope", lambda: prefix)
    broker = await BrokerClient.start(uids=UIDS)
    assert broker.alive
    await broker.close()
    started = start_broker(uids=UIDS)
    assert started.process.poll() is None
    started.close()
    assert started.process.returncode == 0


@pytest.mark.parametrize("boot", ["", "import socket; socket.socket(fileno=0).recv(1 << 18)"])
async def test_broker_that_ends_at_its_start_is_named(
    monkeypatch: pytest.MonkeyPatch, boot: str
) -> None:
    monkeypatch.setattr(spawned, "_BOOT", boot)
    with pytest.raises(errors.Broken) as raised:
        start_broker(uids=UIDS, groups=False)
    assert raised.value.code == "broker_died"
    with pytest.raises(errors.Broken) as raised:
        await BrokerClient.start(uids=UIDS, groups=False)
    assert raised.value.code == "broker_died"


def test_broker_that_refuses_its_first_order_says_why() -> None:
    with pytest.raises(errors.Broken, match="could not hello"):
        start_broker(uids=cast("Any", ()), groups=False)


async def test_broker_that_cannot_be_started_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []
    pair = socket.socketpair

    def socketpair(*words: int) -> tuple[socket.socket, socket.socket]:
        made.extend(ends := pair(*words))
        return ends

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(socket, "socketpair", socketpair)
    with pytest.raises(FileNotFoundError):
        await BrokerClient.start(uids=UIDS, groups=False)
    assert [end.fileno() for end in made] == [-1, -1]


# -- what a confined broker is told at its start ---------------------------------------------------


def confine(answer: dict[str, Any] | None) -> BrokerProcess:
    """Let a broker be confined, which gives this answer; None: it has ended."""
    ours, its = pair()
    with its:
        if answer is not None:
            its.send(json.dumps(answer).encode())
        else:
            its.close()
        made = BrokerProcess(
            cast("subprocess.Popen[bytes]", None),
            ours,
            cast("Capabilities", None),
            cast("Watchdog", None),
        )
        try:
            made.confine({})
        finally:
            ours.close()
    return made


def test_confined_broker_that_refuses_or_ends_is_named() -> None:
    confine({"seq": 0, "ok": {}})
    refused = {"code": "not_granted", "message": "no", "hint": None, "kind": "Denied"}
    with pytest.raises(errors.Denied, match="no"):
        confine({"seq": 0, "error": refused})
    with pytest.raises(errors.Broken) as raised:
        confine(None)
    assert raised.value.code == "broker_died"


def test_broker_that_ends_without_an_answer_to_its_confinement_is_named() -> None:
    ours, its = pair()
    its.shutdown(socket.SHUT_WR)
    made = BrokerProcess(cast("Any", None), ours, cast("Any", None), cast("Any", None))
    with ours, its, pytest.raises(errors.Broken) as raised:
        made.confine({})
    assert raised.value.code == "broker_died"


@pytest.mark.parametrize("kind", [*errors.KINDS.values(), type("Own", (errors.Denied,), {})])
async def test_error_of_the_broker_keeps_its_class(kind: type[errors.SbxError]) -> None:
    """The class was looked up by the code, and each code that the list did not have was Broken: a
    closed port was a bug of sbx, with a traceback in the log."""
    ours, theirs = pair()
    with ours, theirs:
        loop = BrokerLoop(ours)
        loop.send({"seq": 1, "error": kind("no", code="c", hint="h", details={"a": 1})})
        loop.close()
        raised = process.revive(json.loads(theirs.recv(4096))["error"])
    assert type(raised) is (errors.Denied if kind.__name__ == "Own" else kind)
    assert raised.to_dict() == {"code": "c", "message": "no", "hint": "h", "details": {"a": 1}}
