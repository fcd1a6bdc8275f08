"""The agents of a service: one run per conversation, which clients follow from a distance.

A run does not depend on the request that started it: the client may disconnect, and the run
continues. Its events are numbered, so that a client that reconnects receives the missed ones during
the run and for a minute after its end.

    start     open the resources of the agent and start the run; a second start is a Conflict
    ChatRun   the handle of a run: events, abort, its end
    find      return the same handle, by its conversation
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from sbx.agent.messages import Price
from sbx.agent.progress import RunProgress
from sbx.aio import Clock
from sbx.errors import Broken, Conflict, NotFound, SbxError, Unavailable
from sbx.event_log import RETENTION_S, EndedRuns, EventLog
from sbx.protocol.agent import (
    AgentEvent,
    AgentRunEnd,
    AgentRunStart,
    Json,
    StepEnd,
    ToolApproval,
    to_json,
)
from sbx.protocol.approvals import ABORT, RESTART, TIMEOUT
from sbx.telemetry import metrics
from sbx.telemetry.host_paths import without_host_paths

if TYPE_CHECKING:
    from sbx.agent.agent import Agent

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 5.0
_ABORT_S = 10.0  # grace period of an aborted agent; then its task is cancelled
_VALUE_SIZE = 8  # of a number and the like
_EVENT_SIZE = 400  # bytes, the approximate overhead of one event
_RUN_SIZE = 4 << 10  # bytes, about, of a run without events
_ABORTED = AgentRunEnd("aborted", "", {})

Key = tuple[str, ...]  # the owner first, the conversation last


class ChatAsk(Struct, frozen=True):
    """A request to the agent of a conversation. Without a `message` the agent continues where an
    earlier run broke off. A `model` of None is the configured one. `check_command`:
    see AgentOptions."""

    owner: str
    conversation_id: str
    message: str | None
    max_steps: int = 10
    model: str | None = None
    check_command: str | None = None

    @property
    def key(self) -> Key:
        return self.owner, self.conversation_id

    @property
    def size(self) -> int:
        """Return about how many bytes the request takes up."""
        return len(self.message or "")

    @property
    def price(self) -> Price | None:
        """Return the price of its tokens; None if it is not known."""
        return None

    @property
    def start_fields(self) -> Json:
        """Return the fields of `run_start` that name the place of the run, on the wire."""
        return {}


class ChatRun:
    """One run of an agent. All callers share the same object.

    `end` is set as soon as the RunEnd exists. `log` has the events as JSON; the last one is the
    `run_end`. If the run has more events than the limit allows, live output is dropped first. If
    the run could not be started, the log raises the reason.
    """

    def __init__(self, ask: ChatAsk, replay_bytes: int, started_at: float) -> None:
        self.ask = ask
        self.started_at = started_at  # seconds of the epoch
        self.run_id = f"chat-{secrets.token_hex(8)}"
        self.end: AgentRunEnd | None = None
        self.aborted = False
        self.log: EventLog[Json] = EventLog(replay_bytes)
        self.progress = RunProgress(ask.price)
        self._agent: Agent | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Return about how many bytes the ended run keeps in memory."""
        return _RUN_SIZE + self.ask.size + self.log.size

    def events(self, after: int = 0) -> AsyncGenerator[tuple[int, Json], None]:
        """Follow the log from the first event with a number above `after`."""
        return self.log.follow(after)

    async def ended(self) -> None:
        """Wait for the end of the run."""
        await self.log.wait_closed()

    async def abort(self) -> bool:
        """Deny pending approvals, interrupt running calls, and wait for the end. Return False if
        the run had already ended by itself."""
        if self.log.closed or self.end is not None:
            await self.ended()
            return False
        self.aborted = True
        if self._agent is not None:
            self._agent.abort()
        try:
            async with asyncio.timeout(_ABORT_S):
                await self.ended()
        except TimeoutError:
            _log.error("the agent of %s did not end after an abort", self.run_id)
            if self._task is not None:
                self._task.cancel()
            await self.ended()
        return True

    # -- the task of the run ---------------------------------------------------------------------

    def _begin(
        self, agent: "Agent", resources: AsyncExitStack, on_over: Callable[["ChatRun"], None]
    ) -> None:
        self._agent = agent
        self._task = asyncio.create_task(self._live(agent, resources, on_over), name=self.run_id)

    async def _live(
        self, agent: "Agent", resources: AsyncExitStack, on_over: Callable[["ChatRun"], None]
    ) -> None:
        """Record the end only after the resources of the agent are closed, so that a client that
        sees the end can start the next run at once."""
        try:
            async with resources:
                self.end = await self._driven(agent)
        except Exception as error:  # noqa: BLE001  # the border of a background task
            _log.exception("closing %s failed", self.run_id)
            self.end = self.end or _failed(error)
        finally:
            self._finish(self.end or _ABORTED)
            self._agent = self._task = None  # the sandbox of the agent, which may be deleted
            on_over(self)  # before any client reads the end

    async def _driven(self, agent: "Agent") -> AgentRunEnd:
        ask = self.ask
        if self.aborted:  # while it was opened
            return _ABORTED
        try:
            stream = agent.stream(
                ask.message,
                max_steps=ask.max_steps,
                run_id=self.run_id,
                check_command=ask.check_command,
            )
            async with aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, AgentRunEnd):
                        return event
                    self._record(event)
        except asyncio.CancelledError:
            return _ABORTED  # by `abort`, after its grace period; no other code has this task
        except Exception as error:  # noqa: BLE001  # the border of a background task
            if not isinstance(error, SbxError):
                _log.exception("the agent of %s failed", self.run_id)
            return _failed(error)
        return _failed(Broken("the agent ended without an end event"))

    def _finish(self, end: AgentRunEnd) -> None:
        if not self.log.last:
            self._record(AgentRunStart(self.ask.model or "", self.ask.max_steps))
        self._record(end)
        self.log.close()

    def _fail(self, error: BaseException) -> None:
        """Record that the run could not be started."""
        refused = (
            error
            if isinstance(error, SbxError)
            else Unavailable("the start of the chat was cancelled")
        )
        self.log.close(refused)

    def _record(self, event: AgentEvent) -> None:
        record: dict[str, Any] = {
            **to_json(event),
            "seq": self.log.last + 1,
            "run_id": self.run_id,
            "conversation_id": self.ask.conversation_id,
        }
        if isinstance(event, AgentRunStart):
            record |= self.ask.start_fields
        size = _weight(record) + _EVENT_SIZE
        self.progress.follow(event)
        # The end event of a call or an answer repeats its live output in full.
        live = event.type in ("text_delta", "tool_output")
        self.log.append(record, size, droppable=live)
        _count(event)


def _weight(value: Any) -> int:
    """Return about the number of characters in a value of JSON. To encode 15 MiB for their size
    takes 40 ms."""
    match value:
        case str():
            return len(value)
        case dict():
            return sum(len(name) + _weight(part) for name, part in value.items())
        case list() | tuple():
            return sum(map(_weight, value))
    return _VALUE_SIZE


class Chats:
    """All runs of agents. `open` returns the agent of a run with its resources as a context
    manager, which is entered for the duration of the run. When it exits, the `end` of the run is
    known.

    `most` is the limit of runs that work, and `per_owner`, a tenth of it, the limit for one owner.
    An owner may have as many that wait for an approval, which keep no agent of others from work.
    Ended runs are replayed for `replay_s` seconds, within `run_bytes` each and `ended_bytes` in
    total, of which each owner has an equal share. `on_change` is called at the start and at the end
    of a run.
    """

    def __init__(
        self,
        open: "Callable[[ChatRun], AbstractAsyncContextManager[Agent]]",
        clock: Clock,
        *,
        most: int = 1000,
        per_owner: int = 100,
        replay_s: float = RETENTION_S,
        run_bytes: int = 8 << 20,
        ended_bytes: int = 64 << 20,
        on_change: "Callable[[ChatRun], None]" = lambda _: None,
    ) -> None:
        self._open = open
        self._clock = clock
        self._most = most
        self._per_owner = per_owner
        self._run_bytes = run_bytes
        self._running: dict[Key, ChatRun] = {}
        self._ended: EndedRuns[Key, ChatRun] = EndedRuns(clock, ended_bytes, replay_s)
        self._on_change = on_change
        self._closing = False

    async def start(self, ask: ChatAsk) -> ChatRun:
        """Open the resources of the agent and start the run. It continues even if no client follows
        it.

        Raise Conflict `run_in_progress` (details run_id), Unavailable `too_many_chats` and
        `shutting_down` (details retry_after_s), and the errors of `open`.
        """
        self._check_room(ask)
        run = self._running[ask.key] = ChatRun(ask, self._run_bytes, self._clock.now())
        try:
            async with AsyncExitStack() as resources:
                agent = await resources.enter_async_context(self._open(run))
                self._ended.pop(ask.key)
                run._begin(agent, resources.pop_all(), self._over)
                self._on_change(run)
        except BaseException as error:
            del self._running[ask.key]
            run._fail(error)
            raise
        return run

    def find(self, key: Key, run_id: str | None = None) -> ChatRun:
        """Return the current run of a conversation, or the one that ended there recently. With a
        `run_id`, return only this run. Raise NotFound `no_chat`."""
        run = self._running.get(key) or self._ended.get(key)
        if run is None or run_id not in (None, run.run_id):
            raise NotFound(
                f"no agent runs in the conversation {key[-1][:80]!r}",
                code="no_chat",
                hint="the answers of an agent are kept in the messages of the conversation",
            )
        return run

    def running(self, key: Key) -> ChatRun | None:
        return self._running.get(key)

    def every(self) -> list[ChatRun]:
        """Return all current runs."""
        return list(self._running.values())

    async def abort(self, key: Key) -> bool:
        """Abort the current run of a conversation and wait for its end. Return False if there is
        none."""
        run = self.running(key)
        return run is not None and await run.abort()

    async def close(self) -> None:
        """Refuse new runs, abort all current runs, which emit their ends, and forget the ended
        ones."""
        self._closing = True
        await asyncio.gather(*(run.abort() for run in self._running.values()))
        await asyncio.gather(*(run.ended() for run in self._running.values()))
        self._ended.clear()

    def _check_room(self, ask: ChatAsk) -> None:
        if self._closing:
            raise Unavailable(
                "the service is shutting down",
                code="shutting_down",
                hint="send the message again after the restart",
                details={"retry_after_s": _RETRY_AFTER_S},
            )
        if (run := self._running.get(ask.key)) is not None:
            raise Conflict(
                f"an agent already runs in the conversation {ask.conversation_id}",
                code="run_in_progress",
                hint="follow it, wait for its end, or abort it",
                details={"run_id": run.run_id},
            )
        working, waiting = Counter[str](), Counter[str]()
        for key, run in self._running.items():
            (waiting if run.progress.waiting else working)[key[0]] += 1
        for there, limit, what in (
            (working.total(), self._most, "agents already work"),
            (working[ask.owner], self._per_owner, "agents already work"),
            (waiting[ask.owner], self._per_owner, "agents wait for an approval"),
        ):
            if there >= limit:
                raise Unavailable(
                    f"{limit} {what}",
                    code="too_many_chats",
                    hint="wait until one of them ends, or abort one",
                    details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
                )

    def _over(self, run: ChatRun) -> None:
        del self._running[run.ask.key]
        self._ended.add(run.ask.key, run, owner=run.ask.owner, size=run.size)
        self._on_change(run)


def _count(event: AgentEvent) -> None:
    match event:
        case StepEnd():
            metrics.agent_stepped()
        case ToolApproval(approved=True):
            metrics.approval_decided("approved")
        case ToolApproval(by=by):
            metrics.approval_decided(by if by in (TIMEOUT, ABORT, RESTART) else "denied")
        case AgentRunEnd(reason):
            metrics.agent_ran(reason)


def _failed(error: Exception) -> AgentRunEnd:
    """Return the end event for an error. A bug is reported only as such; its cause is in the
    log."""
    reported = error if isinstance(error, SbxError) else Broken("the agent failed")
    return AgentRunEnd("error", "", {}, without_host_paths(reported))
