"""The agents of a service: one run a conversation, followed from afar.

A run belongs to nobody's call: whoever asked for it may go away, and it goes on. Its events have
numbers, so that a follower who comes back gets what was missed, while it lives and for a minute
after its end.

    start     opens what the agent works with, and lets it begin; a second one is Conflict
    ChatRun   what one holds of it: events, abort, its end
    find      the same again, by its conversation
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from sbx.agent.backlog import Backlog
from sbx.clock import Clock
from sbx.errors import Broken, Conflict, NotFound, SbxError, Unavailable
from sbx.lately import Lately
from sbx.protocol.agent import (
    AgentEvent,
    Json,
    RunEnd,
    RunStart,
    StepEnd,
    ToolApproval,
    to_json,
)
from sbx.protocol.approvals import ABORT, RESTART, TIMEOUT
from sbx.telemetry import metrics
from sbx.telemetry.host_paths import without_host_paths

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 5.0
_ABORT_S = 10.0  # for an agent that was told to end; then its task is cancelled
_ABORTED = RunEnd("aborted", "", {})

Key = tuple[str, ...]  # the owner first, the conversation last


class Runner(Protocol):
    """What a run drives: an Agent. After `abort` its events end soon, with a RunEnd."""

    def stream(
        self, message: str | None, /, *, max_steps: int, run_id: str
    ) -> AsyncGenerator[AgentEvent, None]: ...

    def abort(self) -> object: ...


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """What somebody wants of the agent of a conversation. Without a `message` it goes on where an
    earlier run broke off. `model`: None is the configured one."""

    owner: str
    conversation_id: str
    message: str | None
    max_steps: int = 10
    model: str | None = None

    @property
    def key(self) -> Key:
        return self.owner, self.conversation_id


class ChatRun:
    """One run of an agent. All who hold it, and all who find it, hold the same.

    `end` is its RunEnd from the moment that there is one, `over` says that all has been told.
    """

    def __init__(self, ask: ChatAsk, replay_bytes: int) -> None:
        self.ask = ask
        self.run_id = f"chat-{secrets.token_hex(8)}"
        self.end: RunEnd | None = None
        self.over = False
        self.aborted = False
        self._told = Backlog(replay_bytes)
        self._agent: Runner | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: SbxError | None = None
        self._changed = asyncio.Event()

    @property
    def held(self) -> int:
        """About how many bytes its events take up."""
        return self._told.size

    async def events(self, after: int = 0) -> AsyncGenerator[tuple[int, Json], None]:
        """The events with numbers above `after`, as JSON; the first of a run is 1, the last its
        `run_end`. Where more came than is kept, live output is missing first, and numbers jump.
        Raises why, where the run could not be begun."""
        while True:
            found = self._told.next(after)
            if found is not None:
                after = found[0]
                yield found
            elif self.over:
                if self._failure is not None:
                    raise self._failure
                return
            else:
                await self._change()

    async def ended(self) -> None:
        """Wait for its end, whatever it is."""
        while not self.over:
            await self._change()

    async def abort(self) -> bool:
        """Deny what is pending, give up what runs, and wait for the end; False where it came by
        itself before."""
        if self.over or self.end is not None:
            await self.ended()
            return False
        self.aborted = True
        if self._agent is not None:
            self._agent.abort()
        try:
            async with asyncio.timeout(_ABORT_S):
                await self.ended()
        except TimeoutError:
            _log.error("the agent of %s did not end when told to", self.run_id)
            if self._task is not None:
                self._task.cancel()
            await self.ended()
        return True

    # -- how it goes on ------------------------------------------------------------------------

    def _begin(
        self, agent: Runner, held: AsyncExitStack, on_over: Callable[["ChatRun"], None]
    ) -> None:
        self._agent = agent
        self._task = asyncio.create_task(self._live(agent, held, on_over), name=self.run_id)

    async def _live(
        self, agent: Runner, held: AsyncExitStack, on_over: Callable[["ChatRun"], None]
    ) -> None:
        """The end is told last, when all that the agent worked with is closed: whoever hears of it
        may ask again at once."""
        try:
            async with held:
                self.end = await self._driven(agent)
        except Exception as error:  # noqa: BLE001  # the border of a background task
            _log.exception("%s was not closed as it should be", self.run_id)
            self.end = self.end or _failed(error)
        finally:
            self._finish(self.end or _ABORTED)
            on_over(self)  # before any follower has its turn

    async def _driven(self, agent: Runner) -> RunEnd:
        ask = self.ask
        if self.aborted:  # while it was opened
            return _ABORTED
        try:
            stream = agent.stream(ask.message, max_steps=ask.max_steps, run_id=self.run_id)
            async with aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, RunEnd):
                        return event
                    self._tell(event)
        except asyncio.CancelledError:
            return _ABORTED  # by `abort`, when it took too long; nobody else has this task
        except Exception as error:  # noqa: BLE001  # the border of a background task
            if not isinstance(error, SbxError):
                _log.exception("the agent of %s failed", self.run_id)
            return _failed(error)
        return _failed(Broken("the agent ended without saying how"))

    def _finish(self, end: RunEnd) -> None:
        if not self._told.last:
            self._tell(RunStart(self.ask.model or "", self.ask.max_steps))
        self._tell(end)
        self.over = True

    def _fail(self, error: BaseException) -> None:
        """It could not even be begun."""
        refused = error if isinstance(error, SbxError) else Unavailable("the chat was given up")
        self._failure, self.over = refused, True
        self._wake()

    def _tell(self, event: AgentEvent) -> None:
        number = self._told.last + 1
        told: dict[str, Any] = {
            **to_json(event),
            "seq": number,
            "run_id": self.run_id,
            "conversation_id": self.ask.conversation_id,
        }
        self._told.add(told, live=event.type in ("text_delta", "tool_output"))
        _count(event)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change(self) -> None:
        await self._changed.wait()


class Chats:
    """All runs of agents. `open` gives the agent of a run, with all it works with, for as long as
    the run lasts; when it is left, the run's `end` is known.

    `most` may go on at once, and `per_owner` of them for one owner; what has ended is replayed for
    `replay_s` seconds, within `ended_bytes` for all of them and `run_bytes` for each.
    """

    def __init__(
        self,
        open: Callable[[ChatRun], AbstractAsyncContextManager[Runner]],
        clock: Clock,
        *,
        most: int = 200,
        per_owner: int = 100,
        replay_s: float = 60.0,
        run_bytes: int = 8 << 20,
        ended_bytes: int = 64 << 20,
    ) -> None:
        self._open = open
        self._most = most
        self._per_owner = per_owner
        self._run_bytes = run_bytes
        self._running: dict[Key, ChatRun] = {}
        self._ended = Lately[Key, ChatRun](clock, seconds=replay_s, size_max=ended_bytes)
        self._closing = False

    async def start(self, ask: ChatAsk) -> ChatRun:
        """Open what the agent needs, and begin; it goes on whether or not anybody follows.

        Raises Conflict `run_in_progress` (details run_id), Unavailable `too_many_chats` and
        `shutting_down` (details retry_after_s), and what `open` raises.
        """
        self._check_room(ask)
        run = self._running[ask.key] = ChatRun(ask, self._run_bytes)
        try:
            async with AsyncExitStack() as held:
                agent = await held.enter_async_context(self._open(run))
                self._ended.forget(ask.key)
                run._begin(agent, held.pop_all(), self._over)
        except BaseException as error:
            del self._running[ask.key]
            run._fail(error)
            raise
        return run

    def find(self, key: Key, run_id: str | None = None) -> ChatRun:
        """The run that goes on in a conversation, or ended there a moment ago. With a `run_id` this
        one and no other. Raises NotFound `no_chat`."""
        run = self._running.get(key) or self._ended.get(key)
        if run is None or run_id not in (None, run.run_id):
            raise NotFound(
                f"no agent runs in the conversation {key[-1][:80]!r}",
                code="no_chat",
                hint="what an agent said is kept in the conversation's messages",
            )
        return run

    def running(self, key: Key) -> ChatRun | None:
        return self._running.get(key)

    def every(self) -> list[ChatRun]:
        """All that go on."""
        return list(self._running.values())

    async def abort(self, key: Key) -> bool:
        """End what goes on in a conversation, and wait for that; False where nothing does."""
        run = self.running(key)
        return run is not None and await run.abort()

    async def close(self) -> None:
        """Take no more, end all of them, each telling its followers, and forget what has ended."""
        self._closing = True
        await asyncio.gather(*(run.abort() for run in self._running.values()))
        await asyncio.gather(*(run.ended() for run in self._running.values()))
        await self._ended.close()

    def _check_room(self, ask: ChatAsk) -> None:
        if self._closing:
            raise Unavailable(
                "the service is ending",
                code="shutting_down",
                hint="ask again once it is back",
                details={"retry_after_s": _RETRY_AFTER_S},
            )
        if (run := self._running.get(ask.key)) is not None:
            raise Conflict(
                f"an agent runs in the conversation {ask.conversation_id} already",
                code="run_in_progress",
                hint="follow it, wait for its end, or abort it",
                details={"run_id": run.run_id},
            )
        mine = sum(key[0] == ask.owner for key in self._running)
        for there, limit in ((len(self._running), self._most), (mine, self._per_owner)):
            if there >= limit:
                raise Unavailable(
                    f"{limit} agents run already",
                    code="too_many_chats",
                    hint="wait until one of them ends, or abort one",
                    details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
                )

    def _over(self, run: ChatRun) -> None:
        del self._running[run.ask.key]
        self._ended.keep(run.ask.key, run, run.held)


def _count(event: AgentEvent) -> None:
    match event:
        case StepEnd():
            metrics.agent_stepped()
        case ToolApproval(approved=True):
            metrics.approval_decided("approved")
        case ToolApproval(by=by):
            metrics.approval_decided(by if by in (TIMEOUT, ABORT, RESTART) else "denied")
        case RunEnd(reason):
            metrics.agent_ran(reason)


def _failed(error: Exception) -> RunEnd:
    """What is told of a bug is that it is one: its cause is in the log."""
    told = error if isinstance(error, SbxError) else Broken("the agent failed")
    return RunEnd("error", "", {}, without_host_paths(told))
