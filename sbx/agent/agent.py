"""The loop: a model is asked, the tools that it calls are made, their results are told to it.

    system prompt, made fresh + history ──► model ──► answer ──► its calls, in parallel
              ▲                                                        │
              └──────────── results, in the order of the calls ◄───────┘

It ends when an answer calls no tool (`done`), when `completion_check` says so (`done`), after
`max_steps`, by `abort`, when the budget is spent, or by an error of the model's API (`error`). The
last event says which. An error of a tool ends nothing: the model is told, and goes on.
"""

import asyncio
import inspect
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from sbx.agent.approvals import Approvals, Place
from sbx.agent.budget import UNBOUNDED, Budget
from sbx.agent.calls import HERE, Calls
from sbx.agent.changing import ReadSetting, ask_always
from sbx.agent.compaction import WHEN_LONG, Compaction
from sbx.agent.events import Events, Tell
from sbx.agent.history import History, MemoryHistory, Thread
from sbx.agent.messages import Message, Response, carried
from sbx.agent.models import Model
from sbx.agent.prompt import SYSTEM, DescribeFiles, made_fresh
from sbx.agent.sandbox import Conversations, Sandbox, is_sandboxed, one_of
from sbx.agent.step import Answers, Step, results_of
from sbx.agent.tools.permissions import Permissions
from sbx.agent.tools.registry import Tools
from sbx.errors import BadRequest, Broken, Conflict, SbxError
from sbx.isolation.patience import to_the_end
from sbx.protocol.agent import AgentEvent, Json, Reason, RunEnd, RunStart, StepEnd
from sbx.telemetry.host_paths import without_host_paths

CompletionCheck = Callable[[Response], bool | Awaitable[bool]]
OnStep = Callable[[Step], object]


class How(TypedDict, total=False):
    """How a message is answered. `completion_check` is asked of each answer when its calls were
    made, `on_step` is told of each step; both may be coroutine functions. `run_id` is what its
    approvals are known by; one is made where none is given."""

    max_steps: int  # 10
    completion_check: CompletionCheck | None
    on_step: OnStep | None
    run_id: str | None


class Agent:
    """One conversation of a model with tools over a sandbox; one run at a time. Of a whole sandbox
    it works in the conversation `default`.

    `approvals` are asked where `permissions` say `ask`, for a call at this `place`; without them
    such a call is denied. `history` remembers from run to run, and is this object's own where none
    is given. `describe_files` makes of the uploads what the system prompt says of files.
    `changes` reads which changes of a project's files are asked about: every one, without it.
    """

    def __init__(
        self,
        sandbox: Sandbox | Conversations,
        model: Model,
        *,
        tools: Tools | None = None,
        approvals: Approvals | None = None,
        history: History | None = None,
        permissions: Permissions | None = None,
        system: str = SYSTEM,
        budget: Budget = UNBOUNDED,
        compaction: Compaction | None = WHEN_LONG,
        place: Place = HERE,
        describe_files: DescribeFiles | None = None,
        changes: ReadSetting = ask_always,
    ) -> None:
        self.history = MemoryHistory() if history is None else history
        self._sandbox = one_of(sandbox)
        self._model = model
        self._tools = tools or Tools()
        self._approvals = approvals
        self._permissions = permissions or Permissions()
        self._prompt = made_fresh(system, self._sandbox, describe_files)
        self._budget = budget
        self._compaction = compaction
        self._place = place
        self._changes = changes
        self._sandboxed = is_sandboxed(self._sandbox)
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        self._aborted = False

    async def run(self, message: str | Message | None, **how: Unpack[How]) -> RunEnd:
        """Answer a message, and say how that ended. Raises as `stream` does."""
        async with aclosing(self.stream(message, **how)) as events:
            async for event in events:
                if isinstance(event, RunEnd):
                    return event
        raise Broken("the run ended without saying how")

    async def resume(self, **how: Unpack[How]) -> RunEnd:
        """Go on where the history ends, at the last complete step: a call that a crash left without
        a result gets an error as its result, and is not made again."""
        return await self.run(None, **how)

    async def stream(
        self, message: str | Message | None, **how: Unpack[How]
    ) -> AsyncGenerator[AgentEvent, None]:
        """Answer a message and tell all that happens, the end last; None resumes.

        Whoever closes this, or is cancelled, aborts the run, and is not told its end. What goes
        wrong is told by the end. Raises Conflict `run_in_progress`, BadRequest `invalid_max_steps`
        and `invalid_message`, and what `completion_check` and `on_step` raise.
        """
        ask = _asked(message, how)
        if self._task is not None:
            raise Conflict("this agent is answering already", code="run_in_progress")
        self._aborted, events = False, Events()
        self._task = asyncio.create_task(self._run(ask, events.tell))
        try:
            async for event in events.until(self._task):
                yield event
            await self._task
        finally:
            self._task.cancel()
            await to_the_end(asyncio.gather(self._task, return_exceptions=True))
            self._task, self._begun = None, False

    def abort(self) -> None:
        """End the run that goes on: what is pending is denied, what runs is ended, and the stream
        ends with `aborted`. Does nothing where none does."""
        if self._task is None or self._aborted:
            return
        self._aborted = True
        if self._begun:  # a task that is cancelled before that ends without a word
            self._task.cancel()

    # -- the loop --------------------------------------------------------------------------------

    async def _run(self, ask: "_Ask", tell: Tell) -> None:
        self._begun = True
        thread = Thread(self.history)
        answers = Answers(self._model, self._prompt, self._tools.definitions(), thread, tell)
        calls = Calls(
            self._sandbox,
            self._tools,
            tell=tell,
            run_id=ask.run_id,
            permissions=self._permissions,
            approvals=self._approvals,
            place=self._place,
            changes=self._changes,
        )
        tell(RunStart(self._model.name, ask.max_steps, self._sandboxed))
        try:
            reason, error = await self._ended(self._loop(ask, thread, answers, calls, tell))
        finally:
            await thread.close()
        tell(RunEnd(reason, answers.content, answers.usage.to_dict(), error))

    async def _loop(
        self, ask: "_Ask", thread: Thread, answers: Answers, calls: Calls, tell: Tell
    ) -> Reason:
        await thread.open()
        if ask.message is not None:
            await thread.append([ask.message])
        elif not thread.unfinished:
            raise Conflict("the history ends with an answer", code="nothing_to_resume")
        for number in range(1, ask.max_steps + 1):
            if self._aborted:
                return "aborted"
            if self._budget.spent(answers.usage):
                return "budget"
            response = await answers.next(self._compaction)
            results = await results_of(response, calls, thread)
            tell(StepEnd(number, response.usage.to_dict()))
            await _result(ask.on_step(Step(number, response, results)))
            if answers.final or await _result(ask.completion_check(response)):
                return "done"
        return "max_steps"

    async def _ended(self, loop: Coroutine[Any, Any, Reason]) -> tuple[Reason, Json | None]:
        """The reason, whatever ended it."""
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


@dataclass(frozen=True, slots=True)
class _Ask:
    message: Message | None
    max_steps: int
    completion_check: Callable[[Response], object]
    on_step: OnStep
    run_id: str


def _asked(message: str | Message | None, how: How) -> _Ask:
    if isinstance(message, str):
        message = Message("user", message)
    if message is not None and (message.role != "user" or not (message.content or message.images)):
        raise BadRequest("a message is a user's, and says something", code="invalid_message")
    if message is not None:
        message = replace(message, content=carried(message.content))
    max_steps = how.get("max_steps", 10)
    if max_steps < 1:
        raise BadRequest("max_steps is at least 1", code="invalid_max_steps")
    return _Ask(
        message,
        max_steps,
        how.get("completion_check") or (lambda _: False),
        how.get("on_step") or (lambda _: None),
        how.get("run_id") or f"run-{secrets.token_hex(8)}",
    )


async def _result(told: object) -> object:
    return await told if inspect.isawaitable(told) else told
