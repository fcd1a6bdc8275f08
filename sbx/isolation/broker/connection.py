"""The runtime's end of the broker's socket: orders, their replies, and the process.

Everything here is asyncio, and adds only one child process to the embedding program. Orders have
deadlines. A broker that does not reply is killed (see `pulse`).
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from sbx import errors
from sbx.aio import check_process, in_thread
from sbx.isolation.broker import process, watchdog
from sbx.isolation.broker.early_orders import HELLO, ZYGOTE, EarlyOrders
from sbx.isolation.broker.pulse import Pulse
from sbx.isolation.broker.spawned import END_S, SpawnedBroker, spawn_broker
from sbx.isolation.broker.watchdog import Watchdog
from sbx.isolation.probe import Capabilities

_log = logging.getLogger(__name__)
_BEHIND_S = 0.002
_IN_FLIGHT_S, _IN_FLIGHT_PAUSE_S = 3.0, 0.05
_OF_A_ZYGOTE = {"start_zygote": "import the preloaded modules", "fork": "fork a jail"}
_ORDER_MAX = 1 << 17  # as the broker reads; Linux takes no packet above 208 KiB


class BrokerConnection:
    def __init__(self) -> None:
        self._pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._pulse = Pulse(lambda: self.order("ping"), self._is_silent)
        self._why: Callable[[], errors.SbxError] = process.broker_died
        self._sock: socket.socket | None = None
        self._seq = ZYGOTE  # the last number of an early order
        self._greeting: Mapping[str, Any] = {}
        self._early: EarlyOrders | None = None
        self._early_replies: dict[int, Mapping[str, Any]] = {}
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.capabilities: Capabilities | None = None

    @classmethod
    async def start(
        cls,
        *,
        bwrap: str | None = None,
        uids: tuple[int, int],
        groups: bool = True,
        spawned: SpawnedBroker | None = None,
    ) -> Self:
        """Start the process, or take over a `spawned` one. It probes the host. `uids`: (first,
        count)."""
        in_scope, greeting = groups, process.hello(bwrap, uids, groups)
        early = spawned.early if spawned is not None else None
        if spawned is not None and early is not None and not early.matches_hello(greeting):
            await in_thread(spawned.close)
            spawned, early = None, EarlyOrders(early.label)
        while True:
            broker = cls()
            try:
                in_scope = await broker._open(spawned, in_scope=in_scope)
                broker._greeting, broker._early = greeting, early
                if early is not None and early.hello is not None:
                    raw = await broker.early_reply(HELLO, "hello")
                else:
                    raw = await broker.order("hello", **greeting)
            except BaseException as error:
                await broker.close()
                if in_scope and getattr(error, "code", "") in ("broker_died", "broker_silent"):
                    spawned, in_scope = None, False  # systemd-run could not, or waits: without it
                    early = EarlyOrders(early.label) if early is not None else None
                    continue
                raise
            broker.capabilities = Capabilities.from_json(raw)
            broker._pulse.start()
            return broker

    @classmethod
    def adopt(cls, started: process.BrokerProcess) -> Self:
        """Take over a broker of `start_broker`, in the running event loop."""
        broker = cls()
        broker._process, broker._sock = started.process, started.sock
        broker._watchdog = started.watchdog
        broker.capabilities = started.capabilities
        asyncio.get_running_loop().add_reader(started.sock.fileno(), broker._receive)
        broker._pulse.start()
        return broker

    @property
    def alive(self) -> bool:
        """Return whether the broker works; if not, every jail has ended with it."""
        return self._sock is not None

    @property
    def failure(self) -> errors.SbxError | None:
        """Return the reason of its end: Broken `broker_died`, Unavailable `broker_silent`,
        Closed."""
        return None if self.alive else self._why()

    async def order(
        self, do: str, *, fds: Sequence[int] = (), deadline_s: float | None = None, **words: Any
    ) -> dict[str, Any]:
        """Send one order and wait for its outcome. Raise the error of the broker, by its code."""
        self._check_open()
        self._seq += 1
        packet = json.dumps({"seq": self._seq, "do": do, **words}, ensure_ascii=False).encode()
        if len(packet) > _ORDER_MAX:
            raise errors.BadRequest(
                f"the order to the broker has {len(packet)} bytes; the limit is {_ORDER_MAX}",
                code="order_too_large",
                hint="most of it are environment variables: put large values into a file",
            )
        return await self._reply(self._seq, do, deadline_s, packet, fds)

    async def early_reply(
        self, number: int, do: str, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Wait for the outcome of an early order. Raise as `order`."""
        self._check_open()
        return await self._reply(number, do, deadline_s)

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._sock is None:
            raise self._why()

    async def _reply(
        self,
        seq: int,
        do: str,
        deadline_s: float | None,
        packet: bytes = b"",
        fds: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Send the packet, if there is one to send, and wait for its outcome."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._waiting[seq] = answer
        deadline_s, sent_at = deadline_s or process.ORDER_S, loop.time()
        try:
            if packet:
                async with asyncio.timeout(deadline_s):
                    await self._send(packet, fds)
            elif (early := self._early_replies.pop(seq, None)) is not None:
                _settle(answer, early)
            # Not asyncio.timeout: after a blocked loop, the answer and the deadline come together.
            if not (await asyncio.wait((answer,), timeout=sent_at + deadline_s - loop.time()))[0]:
                raise TimeoutError
            return answer.result()
        except (BrokenPipeError, ConnectionResetError):
            raise process.broker_died() from None
        except TimeoutError:
            if do in _OF_A_ZYGOTE:
                raise errors.Unavailable(
                    f"the zygote did not {_OF_A_ZYGOTE[do]} within {deadline_s:g} s",
                    code="zygote_silent",
                ) from None
            self._pulse.unanswered(sent_at)
            raise process.broker_silent(
                f"the broker did not {do} within {deadline_s:g} s"
            ) from None
        finally:
            self._waiting.pop(seq, None)

    async def _open(self, spawned: SpawnedBroker | None, *, in_scope: bool) -> bool:
        """Take over the process, or a new one. Return whether systemd-run starts it."""

        def take(spawned: SpawnedBroker) -> bool:
            self._process, self._sock = spawned.process, spawned.sock
            return spawned.in_scope

        if spawned is not None:
            in_scope = take(spawned)
        else:  # `take` runs in the thread: a cancelled start knows the process and ends it
            in_scope = await in_thread(lambda: take(spawn_broker(in_scope=in_scope)))
        assert self._sock is not None
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._receive)
        return in_scope

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        """Send one packet. Wait while the socket is full, and for a short time while the user of
        this process has too many descriptors in flight."""
        loop = asyncio.get_running_loop()
        gives_up = loop.time() + _IN_FLIGHT_S
        while self._sock is not None:
            try:
                socket.send_fds(self._sock, [packet], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(_BEHIND_S)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                if loop.time() > gives_up:
                    raise _too_many_in_flight() from error
                await asyncio.sleep(_IN_FLIGHT_PAUSE_S)
        raise self._why()

    async def close(self) -> None:
        """End the broker and with it every jail. Ignore processes that have ended already."""
        self._hang_up(process.broker_died)
        self._why = process.closed
        running, self._process = self._process, None
        if running is not None:
            await in_thread(watchdog.end, running, self._watchdog, END_S)

    def _receive(self) -> None:
        """Read every packet that waits: see `order`."""
        while self._sock is not None:
            try:
                packet = self._sock.recv(process.PACKET_MAX)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if packet:
                self._take(packet)
            else:
                self._hang_up(process.broker_died)

    def _take(self, packet: bytes) -> None:
        self._pulse.answered()
        message = json.loads(packet)
        if "event" in message:
            self.on_event(message)
            return
        waiting = self._waiting.get(message["seq"])
        if waiting is not None:
            _settle(waiting, message)
        elif message["seq"] == ZYGOTE:
            self._early_replies[ZYGOTE] = message

    def _is_silent(self) -> None:
        """Kill the broker: jails end with it, and with their sockets."""
        state = process.state(self._process.pid) if self._process is not None else "unknown"
        _log.error("the broker does not reply, and is killed; its state: %s", state)
        self._hang_up(process.broker_silent)
        if self._process is not None:
            watchdog.kill(self._process, self._watchdog)

    def _hang_up(self, why: Callable[[], errors.SbxError]) -> None:
        """Close the socket, or note its end: open orders fail, and every jail ends."""
        self._pulse.stop()
        if self._sock is None:
            return
        self._why = why
        sock, self._sock = self._sock, None
        with contextlib.suppress(RuntimeError):  # the loop may be closed when the process ends
            asyncio.get_running_loop().remove_reader(sock.fileno())
        sock.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(why())
        self.on_end()

    def on_event(self, message: Mapping[str, Any]) -> None:
        """Handle a message that is not a reply."""

    def on_end(self) -> None:
        """Note that the broker has ended, and everything that it started with it."""


def _settle(answer: asyncio.Future[dict[str, Any]], reply: Mapping[str, Any]) -> None:
    if answer.done():
        return
    if "ok" in reply:
        answer.set_result(reply["ok"])
    else:
        answer.set_exception(process.revive(reply["error"]))


def _too_many_in_flight() -> errors.Unavailable:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return errors.Unavailable(
        f"the user of this process has more than {limit} descriptors in flight (ETOOMANYREFS), so"
        " none can be passed to the broker",
        code="too_many_in_flight",
        hint="raise the limit of open files of this process (ulimit -n), or end the program that"
        " sends descriptors which are not received; a sandbox of this user may be that program",
    )
