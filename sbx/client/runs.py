"""A run in a service, and the task that follows it."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sbx import errors
from sbx.aio import call_in_daemon_thread
from sbx.client.errors import decode
from sbx.client.http import HttpClient, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.replies import connection_lost
from sbx.event_log import RETENTION_S, EventLog
from sbx.protocol.events import event_from_json, text_to_json
from sbx.protocol.runs import Event, InputRequest, Run, RunEnd, RunStart
from sbx.run_methods import OnInput

_log = logging.getLogger(__name__)
_REATTACH_S = RETENTION_S - 5.0
_REATTACH_PAUSE_S = 0.25


class RemoteRun:
    """One run. Its own task follows it, whether or not a caller reads its events.

    If the connection is lost, the task connects again and continues after the last event.
    """

    def __init__(
        self, wire: HttpClient, sandbox_id: str, start: tuple[str, bytes], on_input: OnInput | None
    ) -> None:
        self.run_id: str | None = None
        self._wire = wire
        self._sandbox_id = sandbox_id
        self._start = start
        self._on_input = on_input
        self.log: EventLog[Event] = EventLog()
        self._seen = 0  # the service's number of the last event
        self._outcome: Run | BaseException | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._given_up = False
        self.task = asyncio.create_task(self._follow())
        wire.tasks.add(self.task)
        self.task.add_done_callback(self._over)

    async def result(self) -> Run:
        """Wait for the end of the run. Raise the reason if it could not be started."""
        await self.log.wait_closed()
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield every event from the first one to the RunEnd."""
        number = 0
        while (entry := await self.log.next(number)) is not None:
            number, event = entry
            yield event

    async def interrupt(self) -> bool:
        """Interrupt only this run, also while it is queued."""
        self._given_up = True
        if self.run_id is None or self._outcome is not None:
            return False  # `_take` interrupts it when it starts
        reply = await self._wire.call("POST", self._at("interrupt"), again=True)
        return bool(reply.json()["interrupted"])

    # -- following --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            await self._follow_to_end()
        except errors.SbxError as error:
            self._end(error)
        except ConnectionLost as lost:
            unreachable = connection_lost(self._wire.address, lost)
            unreachable.__cause__ = lost
            self._end(unreachable)

    async def _follow_to_end(self) -> None:
        path, body = self._start
        lost: ConnectionLost | None = None
        try:
            await self._read("POST", path, body)
        except (ConnectionLost, errors.Unavailable) as error:
            lost = _as_lost(error)
            if self.run_id is None and isinstance(error, errors.Unavailable):
                raise  # it did not start, and the error has the reason
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _REATTACH_S
        while self._outcome is None:
            if self.run_id is None or loop.time() > deadline:
                raise lost or ConnectionLost("the stream ended before the run did")
            await asyncio.sleep(_REATTACH_PAUSE_S)
            before = self._seen
            try:
                await self._read("GET", self._at("events"), b"")
            except (ConnectionLost, errors.Unavailable) as error:
                lost = _as_lost(error)
            if self._seen > before:
                deadline = loop.time() + _REATTACH_S

    async def _read(self, method: str, path: str, body: bytes) -> None:
        events = self._wire.events(method, path, body=body, after=self._seen)
        async with aclosing(events):
            async for number, _, data in events:
                if number > self._seen and self._outcome is None:
                    self._seen = number
                    self._take(read_event(data))

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStart):
            self.run_id = event.run_id
            if self._given_up:
                self._schedule(self._interrupted())
        elif isinstance(event, InputRequest) and self._on_input is not None:
            self._schedule(self._answer(event.prompt))
        self.log.append(event)
        if isinstance(event, RunEnd):
            self._end(event.run)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._wire.tasks.discard(task)
        for answering in self._answering:
            answering.cancel()
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            _log.error("following a run failed", exc_info=failed)
        self._end(errors.Closed("the client was closed while this ran"))

    def _end(self, outcome: Run | BaseException) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self.log.close(outcome if isinstance(outcome, BaseException) else None)

    # -- answering --------------------------------------------------------------------------------

    def _schedule(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, prompt: str) -> None:
        assert self._on_input is not None
        try:
            line = str(await call_in_daemon_thread(self._on_input, prompt))
            body = json.dumps({"text": text_to_json(line)}).encode("ascii")
            await self._wire.call("POST", self._at("input"), body=body)
        except Exception:  # noqa: BLE001  # the boundary to a function of the caller
            if self._outcome is None:
                _log.exception("input() was not answered; the run is interrupted")
                await self._interrupted()

    async def _interrupted(self) -> None:
        with contextlib.suppress(errors.SbxError):  # it ended by itself, or the service did
            await self._wire.call("POST", self._at("interrupt"), again=True)

    def _at(self, what: str) -> str:
        assert self.run_id is not None
        return target("v1", "sandboxes", self._sandbox_id, "runs", self.run_id, what)


def read_event(data: str) -> Event:
    """Return the event. Raise Broken `foreign_reply`."""
    return decode("event", lambda data: event_from_json(json.loads(data)), data)


def _as_lost(error: Exception) -> ConnectionLost:
    """Return the error as a lost connection. Raise it if it is a refusal of the service."""
    if isinstance(error, ConnectionLost):
        return error
    if isinstance(error, errors.SbxError) and error.code in ("service_unreachable", "timeout"):
        return ConnectionLost(error.message)
    raise error
