"""The runs of a service: queued per conversation, recorded, followed from afar.

A run belongs to nobody's call: whoever started it may go away, and it goes on. Its events have
numbers, so that a follower who comes back gets what was missed, while the run lives and a minute
after its end. Its result is returned once the store has it. Where the store refuses it, the result
is returned as not recorded, and its end is kept in memory and written later.

    start       checked and queued; cells of a conversation are served in order, commands beside
    RunHandle   what one holds: result, events, interrupt, the answers to input()
    attach      the same handle again, by the id of the run
    history     what the store remembers of the runs of a sandbox
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from cachetools import TTLCache

from sbx.aio import Clock
from sbx.errors import (
    BadRequest,
    Closed,
    Conflict,
    NotFound,
    SbxError,
    Unavailable,
)
from sbx.event_log import RETENTION_S
from sbx.kernels.kernel import Kernel
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.languages import LANGUAGES, Language
from sbx.protocol.runs import Event, Run, RunEnd, RunError, Status
from sbx.runtime.conversation import Conversation
from sbx.runtime.run import checks
from sbx.runtime.run.active_run import ActiveRun, SharedRoom
from sbx.runtime.run.context import Context
from sbx.service.auth import Caller
from sbx.service.leases import SandboxLease
from sbx.service.models import SandboxView
from sbx.service.recording import refusal
from sbx.service.sandboxes import Sandboxes
from sbx.store import Store
from sbx.store import runs as rows
from sbx.store.idempotency import Slot
from sbx.store.pending import PendingWrites
from sbx.store.runs import RunFilter
from sbx.store.runs import RunRow as RunRow
from sbx.telemetry import logs, metrics, spans
from sbx.telemetry.host_paths import without_host_paths

Kind = Literal["python", "shell"] | Language

_log = logging.getLogger(__name__)
_REPLAY_MAX = 64 << 20  # bytes, of all runs that have ended
_OUTPUT_MAX = 512 << 20  # bytes of events, of all runs that go on
_OUTPUT_SHARE = 4 << 20  # bytes that each of them may hold in any case
_ASKED_MAX = 256 << 20  # characters of code and stdin, of all runs that go on or wait
_HANDLE_SIZE = 4 << 10  # bytes, about, of a run that printed nothing
_ANSWER_MAX = 1 << 20  # bytes of one line for input()
_NOTE_MAX = 16 << 10  # bytes of a description, of tags, of notes
_TAGS_MAX = 32  # asked for at once
_PRUNED_EVERY = 64  # runs
_RETRY_AFTER_S = 1.0
_CLOSE_S = 10.0
_RECORDED_AFTER_S = 0.02


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What is to be run. `timeout_s` None: the policy's wall_time. `cwd`, `env` and `stdin` are for
    a command or a script only, `args` for a script. `interactive`: input() asks by an InputRequest
    event, answered by `RunHandle.answer`; without it, input() raises inside. `stdin_open`: a
    command also reads what `RunHandle.write` is given. `reservation`: the space and the idempotency
    key of the call, which is recorded with the run."""

    kind: Kind
    code: str
    timeout_s: float | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | None = None
    stdin_open: bool = False
    interactive: bool = False
    description: str | None = None
    tags: str | None = None
    context: str = DEFAULT_CONTEXT
    args: Sequence[str] = ()
    reservation: Slot | None = None

    @property
    def size(self) -> int:
        """In characters."""
        return len(self.code) + len(self.stdin or "")


class RunHandle:
    """One run of the service; every client that attaches to it gets this object. `ended` is true
    when the run is over, `recorded` when the store has its end.

    A cell starts with the next iteration of the event loop, or with the first wait for its result
    before that. If the kernel is idle, the waiter then runs the cell in its own task: see
    `Conversation.run_inline`.
    """

    def __init__(
        self,
        runs: "Runs",
        talk: Context,
        live: ActiveRun,
        begun: rows.Begun,
        ask: RunRequest,
        using: SandboxLease,
    ) -> None:
        self.run_id = begun.id
        self.sandbox_id = begun.sandbox_id
        self.conversation = begun.conversation
        self.context = begun.context
        self.kind = begun.kind
        self._runs = runs
        self._talk = talk
        self._live = live
        self._begun = begun
        self._ask = ask
        self._using: SandboxLease | None = using
        self._soon: asyncio.Handle | None = None
        self._answers: asyncio.Queue[str] | None = asyncio.Queue() if ask.interactive else None
        self._answered = 0
        self._waiting = False
        self._late: asyncio.TimerHandle | None = None
        self._told: asyncio.Event | None = None  # made by the first who waits
        self.ended = False
        self.recorded = True

    async def result(self) -> Run:
        """Wait for the end, which a waiter that is cancelled does not bring about.

        Raises what kept the run from being begun or from ending by itself: Unavailable where there
        is no kernel for it, Closed where its sandbox was deleted meanwhile.
        """
        if self._soon is not None:
            kernel = None if self._ask.interactive else self._talk.free_kernel
            if kernel is None:
                self._begin()
            else:
                await self._drive(kernel)
        await self._recorded()
        return await self._live.result()

    async def events(self, after: int = 0) -> AsyncGenerator[tuple[int, Event], None]:
        """The events with numbers above `after`; the first of a run is 1, the last its RunEnd.
        Raises as `result` does, where there is no RunEnd."""
        try:
            async with aclosing(self._live.log.follow(after)) as numbered:
                async for number, event in numbered:
                    if isinstance(event, RunEnd):
                        await self._recorded()
                    yield number, event
        except SbxError:
            await self._recorded()
            raise

    async def interrupt(self) -> bool:
        """Interrupt it, or take it out of its queue; False when it has ended."""
        if self._live.done:
            return False
        if self._soon is not None:
            self._begin()
        await self._talk.give_up(self._live)
        return True

    async def answer(self, text: str | None) -> None:
        """Answer the oldest question of input(); with None there is no answer, and the run is
        interrupted. Raises Conflict `no_question`, BadRequest `invalid_code`, TooLarge."""
        if self._answers is None or self._live.done or self._answered >= self._live.questions:
            raise Conflict(
                f"{self.run_id} does not wait for input",
                code="no_question",
                hint="answer each input_request event once, of a run started as interactive",
            )
        if text is None:
            await self.interrupt()
            return
        checks.check_text(text, "answer", _ANSWER_MAX)
        self._answered += 1
        self._answers.put_nowait(text)

    async def write(self, text: str | None) -> None:
        """Feed the standard input of a command; see `ActiveRun.write`."""
        await self._live.write(text)

    # -- how it goes on ------------------------------------------------------------------------

    def schedule(self) -> None:
        self._soon = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Take its place in the queue of its conversation, driven by a task of that."""
        self._taken()
        on_input = self._line if self._ask.interactive else None
        ask, live = self._ask, self._live
        try:
            self._talk.start_run(ask.code, timeout=ask.timeout_s, on_input=on_input, live=live)
        except SbxError as error:
            live.fail(error)
        self._runs._record_beginning(self)
        self._runs._settle_later(self)

    async def _drive(self, kernel: Kernel) -> None:
        """Run it here. Nobody but the waiter has been told of the run, so that one which ends at
        once is written down once, with its end: each transaction takes as long as a short cell."""
        self._taken()
        ask, live = self._ask, self._live
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(_RECORDED_AFTER_S, self._runs._record_beginning, self)
        try:
            try:
                timeout_s = self._talk.checked(ask.code, ask.timeout_s)
                await self._talk.run_inline(kernel, live, ask.code, timeout_s, outlives=True)
            except SbxError as error:
                live.fail(error)  # which has it already, as a rule
            await self._runs._settle(self)
        except asyncio.CancelledError:
            self._runs._settle_later(self)
            raise

    def _taken(self) -> None:
        assert self._soon is not None
        self._soon.cancel()
        self._soon = None

    def _waits(self) -> None:
        self._waiting = True
        self._live.on_begun = self._waits_no_more
        metrics.queued()

    def _waits_no_more(self) -> None:
        if self._waiting:
            self._waiting = False
            metrics.unqueued()

    async def _line(self, _prompt: str) -> str:
        assert self._answers is not None
        return await self._answers.get()

    async def _recorded(self) -> None:
        if not self.ended:
            self._told = self._told or asyncio.Event()
            await self._told.wait()

    def _tell(self) -> None:
        self.ended = True
        if self._told is not None:
            self._told.set()

    async def _leave(self) -> None:
        """Its sandbox may be stopped for idleness from now on."""
        using, self._using = self._using, None
        if using is not None:
            await using.__aexit__(None, None, None)


class RunQueue:
    """What goes on in one context and what waits there, in its order."""

    def __init__(self) -> None:
        self.cells: dict[RunHandle, None] = {}
        self.commands: dict[RunHandle, None] = {}

    def of(self, kind: str) -> dict[RunHandle, None]:
        return self.cells if kind == "python" else self.commands

    def current(self) -> list[RunHandle]:
        """What an interrupt means: the cell whose turn it is, else the commands."""
        return list(self.cells)[:1] or list(self.commands)


class Runs:
    """All runs of a service. `queue_max` cells of a context wait behind the one that runs, and
    as many commands run beside it; what has ended is replayed for `replay_s` seconds."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sandboxes: Sandboxes,
        *,
        queue_max: int,
        replay_s: float = RETENTION_S,
        history_max: int = 10_000,
        replay_max: int = _REPLAY_MAX,
        output_max: int = _OUTPUT_MAX,
        pending: PendingWrites | None = None,
    ) -> None:
        self._store = store
        self._pending = pending or PendingWrites(store)
        self._unrecorded: dict[str, RunRow] = {}  # ended, and the store does not have it yet
        self._clock = clock
        self._sandboxes = sandboxes
        self._queue_max = queue_max
        self._room = SharedRoom(output_max, _OUTPUT_SHARE)
        self._asked = 0
        self._history_max = history_max
        self._running: dict[str, RunHandle] = {}
        self._queues: dict[tuple[str, str, str], RunQueue] = {}
        self._ended: TTLCache[str, RunHandle] = TTLCache(
            replay_max, replay_s, timer=clock.now, getsizeof=_memory_of
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._until_pruned = _PRUNED_EVERY

    # -- runs ------------------------------------------------------------------------------------

    async def start(
        self, caller: Caller, sandbox_id: str, conversation: str, ask: RunRequest
    ) -> RunHandle:
        """Start a run, or queue it behind others; it goes on whether or not anybody waits for it.

        Raises as `Sandboxes.using` and `Conversation.start_run` do, and Unavailable `queue_full`
        (details limit, retry_after_s) and `shutting_down`.
        """
        if self._closing:
            raise Unavailable(
                "the service is ending",
                code="shutting_down",
                hint="ask again once it is back",
                details={"retry_after_s": _RETRY_AFTER_S},
            )
        _check_note(ask.description, "description")
        _check_note(ask.tags, "tags")
        using = self._sandboxes.using(
            caller, sandbox_id, scope="execute", conversation=conversation
        )
        await using.__aenter__()
        try:
            within = using.conversation(conversation)
            if ask.kind in LANGUAGES:
                await within.resolve_interpreter(ask.kind)  # a refusal, not a run that failed
            self._check_room(using.id, conversation, ask)
            return self._started(within, using.id, ask, using)
        except BaseException as error:
            await using.__aexit__(type(error), error, error.__traceback__)
            raise

    async def attach(self, caller: Caller, sandbox_id: str | None, run_id: str) -> RunHandle:
        """A run that goes on, or ended a moment ago. Without a `sandbox_id` it is found by its own.

        Raises NotFound, also for a run that the caller may not see.
        """
        handle = self._running.get(run_id) or self._ended.get(run_id)
        if handle is None:
            raise _no_run(run_id)
        view = await self._sandboxes.get(caller, sandbox_id or handle.sandbox_id)
        if view.id != handle.sandbox_id or not _reaches(caller, view, handle.conversation):
            raise _no_run(run_id)
        return handle

    async def interrupt(
        self,
        caller: Caller,
        sandbox_id: str,
        conversation: str,
        context: str = DEFAULT_CONTEXT,
    ) -> bool:
        """Interrupt the cell whose turn it is in a context, or its commands when there is no cell;
        False when nothing runs. What waits goes on to wait."""
        view = await self._sandboxes.get(caller, sandbox_id)
        if not _reaches(caller, view, conversation):
            raise _no_conversation(conversation)
        queue = self._queues.get((view.id, conversation, context))
        current = queue.current() if queue is not None else []
        done = [await handle.interrupt() for handle in current]
        return any(done)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more runs, and wait for those there are; whether all ended in time."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self._running

    async def close(self) -> None:
        """Forget everything, once every run is recorded. To be called after every sandbox was
        closed, which ends its runs, and before the store is."""
        self._closing = True
        if not await self.drain(_CLOSE_S):
            _log.error("%d runs did not end with their sandboxes", len(self._running))
        left = {*self._tasks}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._ended.clear()

    # -- history ---------------------------------------------------------------------------------

    async def entries(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        exec_type: str | None = None,
        success_only: bool = False,
        limit: int = 100,
        offset: int = 0,
        tags: str | None = None,
        has_notes: bool | None = None,
        has_description: bool | None = None,
        conversation: str | None = None,
        running: bool = False,
    ) -> tuple[list[RunRow], int]:
        """The runs of a sandbox, the newest first, and how many there are in all. `tags`: any of
        these, separated by commas. A page may end before its limit: the next one begins at `offset`
        plus the number of rows given."""
        wanted = RunFilter(
            kind=exec_type,
            conversation=conversation,
            success_only=success_only,
            tags=_tags(tags),
            has_notes=has_notes,
            has_description=has_description,
            running=running,
        )
        within, wanted = await self._history_of(caller, sandbox_id, wanted)
        first = [
            row
            for row in reversed(self._unrecorded.values())
            if row.sandbox_id == within and rows.matches(row, wanted)
        ]
        page, count = await rows.of_sandbox(
            self._store,
            within,
            wanted,
            limit=max(0, limit - len(first[offset:])),
            offset=max(0, offset - len(first)),
        )
        known = {row.id for row in first}  # a query for running ones has their beginnings, too
        rest = [row for row in page if row.id not in known]
        return first[offset : offset + limit] + rest, count + len(first) - (len(page) - len(rest))

    async def last(
        self, caller: Caller, sandbox_id: str, *, exec_type: str | None = None
    ) -> RunRow:
        """The newest run that has ended. Raises NotFound."""
        found, _ = await self.entries(caller, sandbox_id, exec_type=exec_type, limit=1)
        if not found:
            raise NotFound(f"nothing was run in {sandbox_id} yet")
        return found[0]

    async def entry(self, caller: Caller, sandbox_id: str, run_id: str) -> RunRow:
        """One run, also while it goes on. Raises NotFound."""
        within, wanted = await self._history_of(caller, sandbox_id, RunFilter())
        found = self._unrecorded.get(run_id)
        if found is None or found.sandbox_id != within:
            found = await rows.of_id(self._store, within, run_id)
        if found is None or wanted.conversation not in (None, found.conversation):
            raise _no_run(run_id)
        return found

    async def annotate(
        self,
        caller: Caller,
        sandbox_id: str,
        run_id: str,
        *,
        description: str | None = None,
        tags: str | None = None,
        notes: str | None = None,
    ) -> RunRow:
        """Write beside a run; what is None stays as it was. Raises NotFound, TooLarge."""
        for text, what in ((description, "description"), (tags, "tags"), (notes, "notes")):
            _check_note(text, what)
        found = await self.entry(caller, sandbox_id, run_id)
        if run_id in self._unrecorded:
            await self._pending.flush()
        if run_id in self._unrecorded:
            raise refusal("not_recording")
        await rows.annotate(
            self._store,
            found.sandbox_id,
            run_id,
            description=description,
            tags=tags,
            notes=notes,
        )
        return await self.entry(caller, sandbox_id, run_id)

    async def _history_of(
        self, caller: Caller, sandbox_id: str, wanted: RunFilter
    ) -> tuple[str, RunFilter]:
        """The sandbox's own id, and what of `wanted` lies within the caller's bounds."""
        view = await self._sandboxes.get(caller, sandbox_id)
        if not _reaches(caller, view, wanted.conversation):
            raise _no_conversation(wanted.conversation or "")
        if caller.conversation_id is None:
            return view.id, wanted
        return view.id, replace(wanted, conversation=caller.conversation_id)

    # -- from its start to its end ---------------------------------------------------------------

    def _check_room(self, sandbox_id: str, conversation: str, ask: RunRequest) -> None:
        queue = self._queues.get((sandbox_id, conversation, ask.context))
        most = self._queue_max + (ask.kind == "python")  # and the one that runs
        if queue is not None and len(queue.of(ask.kind)) >= most:
            raise _full(f"{self._queue_max} runs of this conversation wait", self._queue_max)
        if self._asked + ask.size > _ASKED_MAX:
            raise _full("too much code waits to be run by this service", _ASKED_MAX)

    def _started(
        self,
        within: Conversation,
        sandbox_id: str,
        ask: RunRequest,
        using: SandboxLease,
    ) -> RunHandle:
        talk = within.contexts.find(ask.context)
        if ask.kind == "python":
            talk.checked(ask.code, ask.timeout_s)
            live = talk.new_run()
        elif ask.kind == "shell":
            live = talk.start_shell(
                ask.code,
                timeout=ask.timeout_s,
                cwd=ask.cwd,
                env=ask.env,
                stdin=ask.stdin,
                stdin_open=ask.stdin_open,
            )
        else:
            program = within.prepare_script(
                ask.code, ask.kind, args=ask.args, cwd=ask.cwd, env=ask.env, stdin=ask.stdin
            )
            live = talk.start_program(program, within.script_timeout(ask.timeout_s))
        begun = rows.Begun(
            id=live.run_id,
            sandbox_id=sandbox_id,
            conversation=talk.conversation,
            context=talk.name,
            kind=ask.kind,
            code=ask.code,
            started_at=self._clock.now(),
            description=ask.description,
            tags=ask.tags,
            reservation=ask.reservation,
        )
        handle = RunHandle(self, talk, live, begun, ask, using)
        logs.bind(sandbox=sandbox_id, conversation=talk.conversation, run=live.run_id)
        live.shared = self._room
        self._asked += ask.size
        self._running[begun.id] = handle
        self._idle.clear()
        queue = self._queues.setdefault((sandbox_id, talk.conversation, talk.name), RunQueue())
        if ask.kind == "python" and queue.cells:
            handle._waits()
        queue.of(ask.kind)[handle] = None
        if ask.kind == "python":
            handle.schedule()
        else:
            self._record_beginning(handle)
            self._settle_later(handle)
        return handle

    def _record_beginning(self, handle: RunHandle) -> None:
        handle._late = None
        self._store.write_later(partial(rows.begin, begun=handle._begun))

    def _settle_later(self, handle: RunHandle) -> None:
        task = asyncio.create_task(self._settle(handle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, handle: RunHandle) -> None:
        """Wait for the end, and record it before it is told. May be cancelled, and called again."""
        live = handle._live
        await live.ended()
        self._leaves_queue(handle)
        handle._waits_no_more()
        if handle._late is not None:
            handle._late.cancel()
        run = await _outcome(live)
        at = self._clock.now()
        await self._record_end(handle, run, at)
        await handle._leave()
        _count(handle, run)
        self._keep_for_replay(handle)
        handle._tell()
        self._prune_sometimes(handle.sandbox_id)

    async def _record_end(self, handle: RunHandle, run: Run, at: float) -> None:
        """Record the end, or keep it in memory until the store takes it."""
        begun, run_id = handle._begun, handle.run_id

        def kept() -> tuple[Callable[[sqlite3.Connection], None], int]:
            row = self._unrecorded[run_id] = rows.ended(begun, run, at)
            put = partial(rows.put, row=row, reservation=begun.reservation)
            return put, rows.size_of(row)

        def on_done(stored: bool) -> None:
            handle.recorded = stored
            self._unrecorded.pop(run_id, None)

        act = partial(rows.end, begun=begun, run=run, at=at)
        handle.recorded = False
        try:
            handle.recorded = await self._pending.write(run_id, act, kept=kept, on_done=on_done)
        except Exception as error:  # noqa: BLE001  # the border: its waiters are told all the same
            _log.error("the end of %s was not recorded: %s", run_id, error, exc_info=error)

    def _leaves_queue(self, handle: RunHandle) -> None:
        key = (handle.sandbox_id, handle.conversation, handle.context)
        queue = self._queues.get(key)
        if queue is not None:
            queue.of(handle.kind).pop(handle, None)
            if not queue.cells and not queue.commands:
                del self._queues[key]

    def _prune_sometimes(self, sandbox_id: str) -> None:
        self._until_pruned -= 1
        if self._until_pruned == 0:
            self._until_pruned = _PRUNED_EVERY
            most = self._history_max
            self._store.write_later(lambda on: rows.prune(on, sandbox_id, most))

    def _keep_for_replay(self, handle: RunHandle) -> None:
        handle._live.give_room_back()
        self._asked -= handle._ask.size
        del self._running[handle.run_id]
        if not self._running:
            self._idle.set()
        with suppress(ValueError):  # it is larger than all ended runs may be together
            self._ended[handle.run_id] = handle


def _memory_of(handle: RunHandle) -> int:
    """Return about how many bytes an ended run keeps in memory."""
    return _HANDLE_SIZE + handle._live.size + 2 * handle._ask.size


def _count(handle: RunHandle, run: Run) -> None:
    """For metrics, spans and the log; in the log only what somebody may look for."""
    receipt = handle._talk.receipt
    path = receipt.path if receipt is not None else ""
    metrics.ran(handle.kind, run.status.value, run.duration_s, cause=run.cause, path=path)
    ids = {"sandbox": handle.sandbox_id, "conversation": handle.conversation, "run": handle.run_id}
    spans.record(
        "sbx.run", run.duration_s, kind=handle.kind, status=run.status.value, path=path, **ids
    )
    if run.status not in (Status.OK, Status.ERROR):
        with logs.bound(**ids):
            _log.info("a run ended: %s (%s)", run.status.value, run.cause or "no cause")


async def _outcome(live: ActiveRun) -> Run:
    """The result; of a run that has none, one that says why."""
    try:
        return await live.result()
    except SbxError as error:
        stopped = isinstance(error, Closed) or error.code == "stopped"
        status = Status.INTERRUPTED if stopped else Status.ERROR
        shown = without_host_paths(error)
        return Run(live.run_id, status, error=RunError(error.code, shown["message"], ""))


def _full(what: str, limit: int) -> Unavailable:
    metrics.queue_refused()
    return Unavailable(
        f"{what} already",
        code="queue_full",
        hint="wait for their results",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )


def _reaches(caller: Caller, view: SandboxView, conversation: str | None) -> bool:
    return caller.may("execute") and caller.sees(view.user_id, view.agent_id, conversation)


def _check_note(text: str | None, what: str) -> None:
    if text is not None:
        checks.check_text(text, what, _NOTE_MAX)


def _tags(listed: str | None) -> tuple[str, ...]:
    tags = tuple(tag.strip() for tag in (listed or "").split(",") if tag.strip())
    if len(tags) > _TAGS_MAX:
        raise BadRequest(f"at most {_TAGS_MAX} tags can be asked for at once")
    return tags


def _no_run(run_id: str) -> NotFound:
    return NotFound(f"there is no run {run_id[:80]!r}")


def _no_conversation(name: str) -> NotFound:
    return NotFound(f"there is no conversation {name[:80]!r}")
