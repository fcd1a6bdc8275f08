"""The runs of a service: queued per conversation, recorded, followed.

A run continues when the client that started it disconnects. Its events have numbers, so that a
client can follow it again without a gap, until a minute after its end. Its result is returned once
the store has it, or marked as not recorded if the store refuses it.

    start       check and queue a run; cells of a context run in order, commands next to them
    RunHandle   run.py: the result, the events, interrupt, the answers to input()
    attach      the same handle again, by the id of the run
    history     history.py: the recorded runs
"""

import asyncio
import logging
from collections import Counter
from contextlib import suppress

from sbx.aio import Clock
from sbx.errors import Unavailable
from sbx.event_log import RETENTION_S, EndedRuns
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.languages import LANGUAGES
from sbx.runtime.conversation import Conversation
from sbx.runtime.run.active_run import SharedRoom
from sbx.service.caller import Caller
from sbx.service.history import RunHistory, check_notes, no_conversation, no_run, reaches
from sbx.service.leases import SandboxLease
from sbx.service.run import RunHandle, RunRequest
from sbx.service.sandboxes import Sandboxes
from sbx.store import Store
from sbx.store import runs as rows
from sbx.store.pending import PendingWrites
from sbx.store.runs import RunRow as RunRow
from sbx.telemetry import logs, metrics

_log = logging.getLogger(__name__)
_REPLAY_MAX = 64 << 20  # bytes, of all runs that have ended; each owner has an equal share
_OUTPUT_MAX = 512 << 20  # bytes of events, of all active runs
_OUTPUT_SHARE = 4 << 20  # bytes that each of them may hold in any case
_ASKED_MAX = 256 << 20  # characters of code and stdin, of all active and waiting runs
_ASKED_PER_OWNER = _ASKED_MAX // 4
_RETRY_AFTER_S = 1.0
_CLOSE_S = 10.0


class RunQueue:
    """The runs of one context that run or wait, in their order."""

    def __init__(self) -> None:
        self.cells: dict[RunHandle, None] = {}
        self.commands: dict[RunHandle, None] = {}

    def of(self, kind: str) -> dict[RunHandle, None]:
        return self.cells if kind in ("python", "file") else self.commands

    def current(self) -> list[RunHandle]:
        """Return the runs that an interrupt ends: the first cell, else the commands."""
        return list(self.cells)[:1] or list(self.commands)


class Runs:
    """All runs of a service. `queue_max` cells of a context wait behind the one that runs, and as
    many commands run at once; ended runs are replayed for `replay_s` seconds."""

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
        self.history = RunHistory(store, clock, sandboxes, pending, history_max)
        sandboxes.erasure.forget_runs = self.forget
        self._clock = clock
        self._sandboxes = sandboxes
        self._queue_max = queue_max
        self._room = SharedRoom(output_max, _OUTPUT_SHARE)
        self._asked: Counter[str] = Counter()  # by owner
        self._running: dict[str, RunHandle] = {}
        self._queues: dict[tuple[str, str, str], RunQueue] = {}
        self._ended: EndedRuns[str, RunHandle] = EndedRuns(clock, replay_max, replay_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False

    # -- runs ------------------------------------------------------------------------------------

    async def start(
        self, caller: Caller, sandbox_id: str, conversation: str, request: RunRequest
    ) -> RunHandle:
        """Start a run, or queue it behind others. It continues if no client waits for it.

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
        check_notes(description=request.description, tags=request.tags)
        lease = self._sandboxes.using(
            caller, sandbox_id, scope="execute", conversation=conversation
        )
        await lease.__aenter__()
        try:
            target = lease.conversation(conversation)
            if request.kind in LANGUAGES:
                await target.resolve_interpreter(request.kind)  # a refusal, not a run that failed
            return self._started(target, request, lease)
        except BaseException as error:
            await lease.__aexit__(type(error), error, error.__traceback__)
            raise

    async def attach(self, caller: Caller, sandbox_id: str | None, run_id: str) -> RunHandle:
        """Return a run that has not ended, or ended less than `replay_s` ago.

        Raises NotFound, also for a run that the caller may not see.
        """
        handle = self._running.get(run_id) or self._ended.get(run_id)
        if handle is None:
            raise no_run(run_id)
        view = await self._sandboxes.get(caller, sandbox_id or handle.sandbox_id)
        if view.id != handle.sandbox_id or not reaches(caller, view, handle.conversation):
            raise no_run(run_id)
        return handle

    async def interrupt(
        self,
        caller: Caller,
        sandbox_id: str,
        conversation: str,
        context: str = DEFAULT_CONTEXT,
    ) -> bool:
        """Interrupt the running cell of a context, or without one its commands; False if nothing
        runs. Queued runs stay in the queue."""
        view = await self._sandboxes.get(caller, sandbox_id)
        if not reaches(caller, view, conversation):
            raise no_conversation(conversation)
        queue = self._queues.get((view.id, conversation, context))
        current = queue.current() if queue is not None else []
        done = [await handle.interrupt() for handle in current]
        return any(done)

    def forget(self, sandbox_id: str, conversation: str | None) -> list[rows.Begun]:
        """Forget the runs of a sandbox, or of one conversation, whose content is deleted. Return
        those that the store may not have yet. Their end is not recorded, and no client can follow
        them again."""

        def matches(begun: rows.Begun) -> bool:
            return begun.sandbox_id == sandbox_id and conversation in (None, begun.conversation)

        self._ended.discard(lambda handle: matches(handle.begun))
        active = [handle for handle in self._running.values() if matches(handle.begun)]
        for handle in active:
            handle.forget()
        self.history.forget(sandbox_id, conversation)
        return [handle.begun for handle in active]

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new runs, and wait for the others. Return whether all ended in time."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self._running

    async def close(self) -> None:
        """Forget all runs once they are recorded. Call it after the sandboxes were closed, which
        ends their runs, and before the store is closed."""
        self._closing = True
        if not await self.drain(_CLOSE_S):
            _log.error("%d runs did not end with their sandboxes", len(self._running))
        left = {*self._tasks}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._ended.clear()

    # -- from its start to its end ---------------------------------------------------------------

    def _started(
        self, conversation: Conversation, request: RunRequest, lease: SandboxLease
    ) -> RunHandle:
        key = (lease.id, conversation.name, request.context)
        queue = self._queues.get(key)
        waiting_max = self._queue_max + request.waits  # and the cell that runs
        if queue is not None and len(queue.of(request.kind)) >= waiting_max:
            raise _full(f"{self._queue_max} runs of this conversation wait", self._queue_max)
        size = request.size
        owner = lease.caller.owner
        if self._asked[owner] + size > _ASKED_PER_OWNER:
            raise _full("too much code of this owner waits to be run", _ASKED_PER_OWNER)
        if self._asked.total() + size > _ASKED_MAX:
            raise _full("too much code waits to be run by this service", _ASKED_MAX)
        context = conversation.contexts.find(request.context)
        timeout_s, file = 0.0, None
        if request.kind == "file":
            file = conversation.file_runs.check(request.as_call)
            timeout_s = context.timeout_s(request.timeout_s)
            live = context.new_run()
        elif request.kind == "python":
            timeout_s = context.checked(request.code, request.timeout_s)
            live = context.new_run()
        elif request.kind == "shell":
            live = context.start_shell(
                request.code,
                timeout=request.timeout_s,
                cwd=request.cwd,
                env=request.env,
                stdin=request.stdin,
                stdin_open=request.stdin_open,
            )
        else:
            program = conversation.prepare_script(
                request.code,
                request.kind,
                args=request.args,
                cwd=request.cwd,
                env=request.env,
                stdin=request.stdin,
            )
            live = context.start_program(program, conversation.script_timeout(request.timeout_s))
        begun = rows.Begun(
            id=live.run_id,
            sandbox_id=lease.id,
            conversation=context.conversation,
            context=context.name,
            kind=request.kind,
            code=request.code,
            started_at=self._clock.now(),
            description=request.description,
            tags=request.tags,
            reservation=request.reservation,
        )
        handle = RunHandle(
            context,
            live,
            begun,
            request,
            lease,
            timeout_s,
            size,
            conversation=conversation,
            file=file,
            record=self.history.begin,
            settle=self._settle,
            settle_later=self._settle_later,
        )
        logs.bind(sandbox=lease.id, conversation=context.conversation, run=live.run_id)
        live.shared = self._room
        self._asked[owner] += size
        self._running[begun.id] = handle
        self._idle.clear()
        if queue is None:
            queue = self._queues[key] = RunQueue()
        if request.waits and queue.cells:
            handle.enter_queue()
        queue.of(request.kind)[handle] = None
        if request.waits:
            handle.schedule()
        else:
            handle.record_beginning()
            self._settle_later(handle)
        return handle

    def _settle_later(self, handle: RunHandle) -> None:
        task = asyncio.create_task(self._settle(handle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, handle: RunHandle) -> None:
        """Wait for the end, and record it before any waiter gets it. May be cancelled, and called
        again."""

        def on_done(stored: bool) -> None:
            handle.recorded = stored

        run = await handle.outcome()
        self._remove_from_queue(handle)
        handle.recorded = False
        if not handle.forgotten:
            handle.recorded = await self.history.end(handle.begun, run, on_done)
        await handle.release(run)
        self._keep_for_replay(handle)
        handle.set_ended()
        self.history.prune_sometimes(handle.sandbox_id)

    def _remove_from_queue(self, handle: RunHandle) -> None:
        key = (handle.sandbox_id, handle.conversation, handle.context)
        queue = self._queues.get(key)
        if queue is not None:
            queue.of(handle.kind).pop(handle, None)
            if not queue.cells and not queue.commands:
                del self._queues[key]

    def _keep_for_replay(self, handle: RunHandle) -> None:
        handle.live.give_room_back()
        self._asked[handle.owner] -= handle.request_size
        if not self._asked[handle.owner]:
            del self._asked[handle.owner]
        del self._running[handle.run_id]
        if not self._running:
            self._idle.set()
        if not handle.forgotten:
            self._ended.add(handle.run_id, handle, owner=handle.owner, size=handle.size)


def _full(what: str, limit: int) -> Unavailable:
    metrics.queue_refused()
    return Unavailable(
        f"{what} already",
        code="queue_full",
        hint="wait for their results",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
