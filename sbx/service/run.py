"""One run of a service, from its start until its end is recorded."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from msgspec import Struct

from sbx.errors import Closed, Conflict, SbxError
from sbx.kernels.kernel import Kernel
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.languages import Language
from sbx.protocol.runs import Event, Run, RunEnd, RunError, Status
from sbx.run_methods import RunCall
from sbx.runtime.conversation import Conversation
from sbx.runtime.processes.scripts import PythonFile
from sbx.runtime.run import checks
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context import Context
from sbx.service.leases import SandboxLease
from sbx.store.idempotency import Slot
from sbx.store.runs import Begun
from sbx.telemetry import logs, metrics, spans
from sbx.telemetry.host_paths import without_host_paths

Kind = Literal["python", "shell", "file"] | Language

_HANDLE_SIZE = 4 << 10  # bytes, about, of a run that printed nothing
_ANSWER_MAX = 1 << 20  # bytes of one line for input()
_RECORDED_AFTER_S = 0.02
_log = logging.getLogger(__name__)


class RunRequest(Struct, frozen=True):
    """A request for a run. Without a `timeout_s`, the policy's run_timeout applies. `cwd`, `env`
    and `stdin` are for a command, a script or a file of Python, `args` for the last two. `source`,
    `stdin_data` and `shows_value` are for a file: see `RunCall`. `interactive`: input()
    emits an InputRequest event, which `RunHandle.answer` answers; without it, input() raises.
    `stdin_open`: `RunHandle.write` feeds the command. `reservation`: the space and the idempotency
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
    source: bytes | None = None
    stdin_data: bytes | None = None
    shows_value: bool = False
    reservation: Slot | None = None

    @property
    def size(self) -> int:
        """In characters."""
        texts = (self.code, self.stdin or "", self.source or b"", self.stdin_data or b"")
        return sum(map(len, texts))

    @property
    def as_call(self) -> RunCall:
        """Return the call of a file of Python."""
        return RunCall(
            "file",
            self.code,
            args=self.args,
            cwd=self.cwd,
            env=self.env,
            source=self.source,
            stdin_data=self.stdin_data,
            shows_value=self.shows_value,
        )

    @property
    def waits(self) -> bool:
        """Whether it waits in the queue of its context: commands and scripts run at once."""
        return self.kind in ("python", "file")


class RunHandle:
    """One run of the service; every client that attaches to it gets this object. `ended` is true
    when the run is over, `recorded` when the store has its end.

    A cell starts with the next iteration of the event loop, or with the first wait for its result
    before that. If the kernel is idle, the waiter then runs the cell in its own task: see
    `Conversation.run_inline`.
    """

    def __init__(
        self,
        context: Context,
        live: ActiveRun,
        begun: Begun,
        request: RunRequest,
        lease: SandboxLease,
        timeout_s: float,
        request_size: int,
        *,
        conversation: Conversation,
        file: PythonFile | None,
        record: Callable[[Begun], None],
        settle: Callable[["RunHandle"], Coroutine[Any, Any, None]],
        settle_later: Callable[["RunHandle"], None],
    ) -> None:
        """`timeout_s`: the checked time-out of a cell or a `file`. `record` writes the beginning to
        the store. `settle` waits for the end and records it; `settle_later` does so in a task."""
        self.run_id = begun.id
        self.owner = lease.caller.owner
        self.sandbox_id = begun.sandbox_id
        self.conversation = begun.conversation
        self.context = begun.context
        self.kind = begun.kind
        self.live = live
        self.begun = begun
        self.request = request
        self.request_size = request_size
        self._timeout_s = timeout_s
        self._context = context
        self._files = conversation
        self._file = file
        self._lease: SandboxLease | None = lease
        self._record = record
        self._settle = settle
        self._settle_later = settle_later
        self._soon: asyncio.Handle | None = None
        self._answers: asyncio.Queue[str] | None = asyncio.Queue() if request.interactive else None
        self._answered = 0
        self._waiting = False
        self._late: asyncio.TimerHandle | None = None
        self._ended: asyncio.Event | None = None  # made by the first waiter
        self.ended = False
        self.recorded = True
        self.forgotten = False  # its conversation was deleted, and nothing of it is recorded

    async def result(self) -> Run:
        """Wait for the end. A waiter that is cancelled does not end the run.

        Raises Unavailable if no kernel could be started, Closed if the sandbox was deleted.
        """
        if self._soon is not None:
            inline = self.request.kind == "python" and not self.request.interactive
            kernel = self._context.free_kernel if inline else None
            if kernel is None:
                self._begin()
            else:
                await self._drive(kernel)
        await self._recorded()
        return await self.live.result()

    async def events(self, after: int = 0) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events with numbers above `after`. The first of a run is 1, the last is its
        RunEnd. Raises as `result` instead of the RunEnd."""
        try:
            async with aclosing(self.live.log.follow(after)) as numbered:
                async for number, event in numbered:
                    if isinstance(event, RunEnd):
                        await self._recorded()
                    yield number, event
        except SbxError:
            await self._recorded()
            raise

    async def interrupt(self) -> bool:
        """Interrupt it, or remove it from its queue; False if it has ended."""
        if self.live.done:
            return False
        if self._soon is not None:
            self._begin()
        await self._files.give_up(self.live)
        return True

    async def answer(self, text: str | None) -> None:
        """Answer the oldest question of input(); None interrupts the run instead.

        Raises Conflict `no_question`, BadRequest `invalid_code`, TooLarge.
        """
        if self._answers is None or self.live.done or self._answered >= self.live.questions:
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
        await self.live.write(text)

    def schedule(self) -> None:
        self._soon = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Enter the queue of the context, whose task runs it."""
        self._taken()
        on_input = self._line if self.request.interactive else None
        request, live = self.request, self.live
        try:
            if self._file is not None:
                self._files.file_runs.start(
                    self._context, live, self._file, self._timeout_s, on_input
                )
            else:
                self._context.start_checked(live, request.code, self._timeout_s, on_input)
        except SbxError as error:
            live.fail(error)
        self.record_beginning()
        self._settle_later(self)

    async def _drive(self, kernel: Kernel) -> None:
        """Run it in the task of the waiter. No other client knows of it yet, so a run that ends at
        once is written once, with its end: each transaction takes as long as a short cell."""
        self._taken()
        request, live = self.request, self.live
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(_RECORDED_AFTER_S, self.record_beginning)
        try:
            try:
                await self._context.run_inline(
                    kernel, live, request.code, self._timeout_s, outlives=True
                )
            except SbxError as error:
                live.fail(error)  # it has ended already, as a rule
            await self._settle(self)
        except asyncio.CancelledError:
            self._settle_later(self)
            raise

    def _taken(self) -> None:
        assert self._soon is not None
        self._soon.cancel()
        self._soon = None

    def enter_queue(self) -> None:
        self._waiting = True
        self.live.on_begun = self._leave_queue
        metrics.queued()

    def _leave_queue(self) -> None:
        if self._waiting:
            self._waiting = False
            metrics.unqueued()

    async def _line(self, _prompt: str) -> str:
        assert self._answers is not None
        return await self._answers.get()

    async def _recorded(self) -> None:
        if not self.ended:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    def record_beginning(self) -> None:
        self._late = None
        if not self.forgotten:
            self._record(self.begun)

    def forget(self) -> None:
        """Record neither the beginning nor the end."""
        self.forgotten = True

    async def outcome(self) -> Run:
        """Wait for the end. Return the result, or for a run without one a result with the error."""
        await self.live.ended()
        self._leave_queue()
        if self._late is not None:
            self._late.cancel()
            self._late = None
        try:
            return await self.live.result()
        except SbxError as error:
            stopped = isinstance(error, Closed) or error.code == "stopped"
            status = Status.INTERRUPTED if stopped else Status.ERROR
            shown = without_host_paths(error)
            return Run(self.run_id, status, error=RunError(error.code, shown["message"], ""))

    async def release(self, run: Run) -> None:
        """End the lease, and count the run; its sandbox may be stopped as idle from now on."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.__aexit__(None, None, None)
        self._count(run)

    def set_ended(self) -> None:
        self.ended = True
        # This stays for a minute: a deleted sandbox must not, and a full collection of garbage
        # walks 25 objects of each ended run.
        del self._context, self._files, self._record, self._settle, self._settle_later
        if self._ended is not None:
            self._ended.set()

    @property
    def size(self) -> int:
        """Return about how many bytes the ended run keeps in memory."""
        return _HANDLE_SIZE + self.live.size + 2 * self.request_size

    def _count(self, run: Run) -> None:
        """Report the run to metrics and spans, and an unusual end to the log."""
        receipt = self._context.receipt
        path = receipt.path if receipt is not None else ""
        status, policy = run.status.value, self._context.policy.name
        metrics.ran(self.kind, status, policy, run.duration_s, cause=run.cause, path=path)
        ids = {"sandbox": self.sandbox_id, "conversation": self.conversation, "run": self.run_id}
        spans.record(
            "sbx.run",
            run.duration_s,
            kind=self.kind,
            status=status,
            policy=policy,
            path=path,
            **ids,
        )
        if run.status not in (Status.OK, Status.ERROR):
            with logs.bound(**ids):
                _log.info("a run ended: %s (%s)", run.status.value, run.cause or "no cause")
