"""The loop: ask the model, run the tools that it calls, and append their results to the history.

    fresh system prompt + history ──► model ──► answer ──► its calls, in parallel
              ▲                                                        │
              └──────────── results, in the order of the calls ◄───────┘

The run ends when an answer calls no tool (`done`), when `completion_check` returns true (`done`),
after `max_steps`, on `abort`, when the budget is spent, or when the API of the model fails
(`error`). The last event names the reason. An error of a tool does not end the run: the model
receives it as a result and continues.
"""

import asyncio
import inspect
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypedDict, Unpack

from msgspec import Struct
from msgspec.structs import replace

from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.call_events import EmitEvent
from sbx.agent.calls import HERE, AgentToolCalls
from sbx.agent.changing import ReadSetting, ask_always
from sbx.agent.compaction import WHEN_LONG, Compaction
from sbx.agent.history import MemoryHistory, MessageHistory, Thread
from sbx.agent.messages import Message, Price, Response, TokenUsage, carried
from sbx.agent.models import Model
from sbx.agent.prompt import surroundings_of, system_prompt
from sbx.agent.sandbox import Conversations, ToolSandbox, is_sandboxed, one_of
from sbx.agent.state import AgentState, RunRecord
from sbx.agent.step import ModelAnswers, Step, SystemPrompt, results_of
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.registry import Tools
from sbx.aio import run_to_completion
from sbx.errors import BadRequest, Broken, Conflict, SbxError
from sbx.protocol.agent import AgentEvent, AgentRunEnd, AgentRunStart, Json, Reason, StepEnd
from sbx.protocol.files import Upload
from sbx.protocol.surroundings import Surroundings
from sbx.telemetry import spans
from sbx.telemetry.host_paths import without_host_paths
from sbx.workspace.uploads import uploads_told

CHECK_FAILED = "The task is not complete, because this check failed:"

DescribeFiles = Callable[[Sequence[Upload]], str]
CompletionCheck = Callable[[Response], bool | Awaitable[bool]]
OnStep = Callable[[Step], object]


class Budget(Struct, frozen=True):
    """None means no limit. `tokens` limits input and output together, and `cost` their `price`.
    Both are checked after each answer, so the last answer may exceed them. `seconds` limits the
    wall-clock time, including all waits; running calls are interrupted when it is over."""

    tokens: int | None = None
    seconds: float | None = None
    cost: float | None = None
    price: Price | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds", "cost"):
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise BadRequest(f"the {name} of a budget must be above 0", code="invalid_budget")
        if self.cost is not None and self.price is None:
            raise BadRequest("the cost of a budget needs a price", code="invalid_budget")

    def spent(self, usage: TokenUsage) -> bool:
        if self.tokens is not None and usage.total >= self.tokens:
            return True
        if self.cost is None or self.price is None:
            return False
        return self.price.of(usage) >= self.cost


UNBOUNDED = Budget()


class AgentOptions(TypedDict, total=False):
    """The options of one run. `completion_check` is called with each answer after the calls of the
    answer have been made. `on_step` is called with each step. Both may be coroutine functions. The
    approvals of the run carry its `run_id`; the default is a random id.

    `check_command` runs in the sandbox after an answer that calls no tool. Exit code 0 ends the
    run; otherwise the model gets the output as a message, and the run continues."""

    max_steps: int  # 10
    completion_check: CompletionCheck | None
    check_command: str | None
    on_step: OnStep | None
    run_id: str | None


class Agent:
    """One conversation of a model that uses tools in a sandbox. It does one run at a time. In a
    sandbox with several conversations it uses the conversation `default`.

    `approvals` receives each call for which `permissions` returns `ask`, together with `place`.
    Without `approvals` such a call is denied. `history` keeps the messages between runs; by default
    the agent has its own in memory. The system prompt and the definitions of tools name the paths,
    languages and tools that this sandbox has. `system` replaces that prompt, and `instructions`
    follow it. `describe_files` turns the list of uploads into the text about files, which is last.
    `changes` reads the setting that decides which changes of project
    files need an approval. By default all of them do.
    """

    def __init__(
        self,
        sandbox: ToolSandbox | Conversations,
        model: Model,
        *,
        tools: Tools | None = None,
        approvals: Approvals | None = None,
        history: MessageHistory | None = None,
        permissions: Permissions | None = None,
        system: str | None = None,
        instructions: str = "",
        budget: Budget = UNBOUNDED,
        compaction: Compaction | None = WHEN_LONG,
        place: AgentContext = HERE,
        describe_files: DescribeFiles | None = None,
        changes: ReadSetting = ask_always,
    ) -> None:
        self.history = MemoryHistory() if history is None else history
        self._sandbox = one_of(sandbox)
        self._model = model
        self._tools = tools or Tools()
        self._approvals = approvals
        self._permissions = permissions or Permissions()
        self._system = system
        self._instructions = instructions
        self._describe_files = describe_files
        self._budget = budget
        self._compaction = compaction
        self._place = place
        self._changes = changes
        self._sandboxed = is_sandboxed(self._sandbox)
        self._task: asyncio.Task[None] | None = None
        self._is_started = False
        self._aborted = False
        self._record: RunRecord | None = None

    @property
    def state(self) -> AgentState:
        """Return the state of the current run, or of the last one. The value does not change."""
        if self._record is None:
            return AgentState()
        return self._record.state(active=self._task is not None)

    async def run(self, message: str | Message | None, **how: Unpack[AgentOptions]) -> AgentRunEnd:
        """Answer a message and return the end of the run. Raise the same errors as `stream`."""
        async with aclosing(self.stream(message, **how)) as events:
            async for event in events:
                if isinstance(event, AgentRunEnd):
                    return event
        raise Broken("the run ended without an end event")

    async def resume(self, **how: Unpack[AgentOptions]) -> AgentRunEnd:
        """Continue at the last complete step of the history. A call that has no result because of a
        crash gets an error as its result and is not repeated."""
        return await self.run(None, **how)

    async def stream(
        self, message: str | Message | None, **how: Unpack[AgentOptions]
    ) -> AsyncGenerator[AgentEvent, None]:
        """Answer a message and yield all events; the last one is the end. None resumes the last
        run.

        Closing this generator or cancelling its task aborts the run without an end event. Failures
        of the run are reported in the end event. Raise Conflict `run_in_progress`, BadRequest
        `invalid_max_steps` and `invalid_message`, and all errors that `completion_check` and
        `on_step` raise.
        """
        request = _request(message, how)
        if self._task is not None:
            raise Conflict("this agent is answering already", code="run_in_progress")
        self._aborted, events = False, _EventQueue()
        record = RunRecord(request.run_id, request.max_steps, self._budget.price)
        self._record = record

        def emit(event: AgentEvent) -> None:
            record.follow(event)
            events.emit(event)

        self._task = asyncio.create_task(self._run(request, emit))
        try:
            async for event in events.until(self._task):
                yield event
            await self._task
        finally:
            self._task.cancel()
            await run_to_completion(asyncio.gather(self._task, return_exceptions=True))
            self._task, self._is_started = None, False

    def abort(self) -> None:
        """Abort the current run, if there is one. Pending approvals are denied, running calls are
        interrupted, and the stream ends with `aborted`."""
        if self._task is None or self._aborted:
            return
        self._aborted = True
        if self._is_started:  # a task that is cancelled before it starts emits no event
            self._task.cancel()

    # -- the loop --------------------------------------------------------------------------------

    async def _run(self, request: "_Request", emit: EmitEvent) -> None:
        self._is_started = True
        thread = Thread(self.history)
        around = await surroundings_of(self._sandbox)
        definitions = self._tools.with_access(self._sandbox).definitions(around)
        answers = ModelAnswers(self._model, self._prompt_in(around), definitions, thread, emit)
        calls = AgentToolCalls(
            self._sandbox,
            self._tools,
            emit=emit,
            run_id=request.run_id,
            permissions=self._permissions,
            approvals=self._approvals,
            place=self._place,
            changes=self._changes,
        )
        emit(AgentRunStart(self._model.name, request.max_steps, self._sandboxed))
        try:
            reason, error = await self._ended(self._loop(request, thread, answers, calls, emit))
        finally:
            await thread.close()
        usage = answers.usage + calls.usage
        emit(AgentRunEnd(reason, answers.content, usage.to_dict(), error))

    def _prompt_in(self, around: Surroundings) -> SystemPrompt:
        """Return a function that builds the prompt. It is called before each request to the model,
        because files come and go while an agent works."""
        system = self._system
        text = system_prompt(around, self._instructions) if system is None else system
        describe = self._describe_files or partial(uploads_told, around=around)

        async def prompt() -> str:
            files = describe(await self._sandbox.uploads.list())
            return f"{text}\n\n{files}" if text else files

        return prompt

    async def _loop(
        self,
        request: "_Request",
        thread: Thread,
        answers: ModelAnswers,
        calls: AgentToolCalls,
        emit: EmitEvent,
    ) -> Reason:
        await thread.open()
        if request.message is not None:
            await thread.append([request.message])
        elif not thread.unfinished:
            raise Conflict("the history ends with an answer", code="nothing_to_resume")
        for number in range(1, request.max_steps + 1):
            if self._aborted:
                return "aborted"
            if self._budget.spent(answers.usage + calls.usage):
                return "budget"
            with spans.span("sbx.agent.step", step=number, run=request.run_id):
                response = await answers.next(self._compaction)
                results = await results_of(response, calls, thread)
            emit(StepEnd(number, response.usage.to_dict()))
            await _result(request.on_step(Step(number, response, results)))
            if answers.final:
                command = request.check_command
                if command is None or not (check := await calls.check(command)).is_error:
                    return "done"
                await thread.append([Message("user", f"{CHECK_FAILED} {command}\n{check.text}")])
            elif await _result(request.completion_check(response)):
                return "done"
        return "max_steps"

    async def _ended(self, loop: Coroutine[Any, Any, Reason]) -> tuple[Reason, Json | None]:
        """Return the reason for the end of the loop, and the error if there was one."""
        try:
            async with asyncio.timeout(self._budget.seconds) as clock:
                return await loop, None
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            return "aborted", None
        except TimeoutError:
            if not clock.expired():
                raise
            return "budget", None
        except SbxError as error:
            return "error", without_host_paths(error)


class _Request(Struct, frozen=True):
    message: Message | None
    max_steps: int
    completion_check: Callable[[Response], object]
    on_step: OnStep
    run_id: str
    check_command: str | None


def _request(message: str | Message | None, how: AgentOptions) -> _Request:
    if isinstance(message, str):
        message = Message("user", message)
    if message is not None and (message.role != "user" or not (message.content or message.images)):
        raise BadRequest("a message must be from the user and not be empty", code="invalid_message")
    if message is not None:
        message = replace(message, content=carried(message.content))
    max_steps = how.get("max_steps", 10)
    if max_steps < 1:
        raise BadRequest("max_steps must be at least 1", code="invalid_max_steps")
    return _Request(
        message,
        max_steps,
        how.get("completion_check") or (lambda _: False),
        how.get("on_step") or (lambda _: None),
        how.get("run_id") or f"run-{secrets.token_hex(8)}",
        how.get("check_command"),
    )


async def _result(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


class _EventQueue:
    """The events of a run, for one reader. `emit` adds an event at once and never waits for the
    reader. The output of the run limits the size of the queue."""

    def __init__(self) -> None:
        self._queue: deque[AgentEvent] = deque()
        self._changed = asyncio.Event()

    def emit(self, event: AgentEvent) -> None:
        self._queue.append(event)
        self._changed.set()

    async def until(self, task: "asyncio.Task[Any]") -> AsyncGenerator[AgentEvent, None]:
        """Yield all events until the task has ended and the queue is empty."""
        task.add_done_callback(lambda _: self._changed.set())
        while True:
            while self._queue:
                yield self._queue.popleft()
            if task.done():
                return
            self._changed.clear()
            await self._changed.wait()
