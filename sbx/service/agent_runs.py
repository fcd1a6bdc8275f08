"""The parts of one run of an agent: the model, the sandbox, the permissions and the history.

    AgentRequest ── AgentRunFactory.agent ──► Agent, recorded in the store, closed after the run

Code of an agent runs as all code does: queued behind others, recorded, within the limits of the
owner. Through a tool, an agent may do no more than its caller by direct calls.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from sbx.agent.agent import Agent
from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.chats import ChatAsk, ChatRun, Key
from sbx.agent.external.registry import ExternalTools
from sbx.agent.history import MemoryHistory, MessageHistory, StoredHistory
from sbx.agent.messages import Price, Response, ToolCall
from sbx.agent.models import Model
from sbx.agent.models.replay import ReplayModel
from sbx.agent.profile import NO_PROFILE, AgentProfile
from sbx.agent.sandbox import ToolSandbox, commands_allowed
from sbx.agent.tools.approval_rules import Mode, Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Arguments, Ruling, Tool
from sbx.errors import SbxError
from sbx.protocol.agent import Json
from sbx.protocol.languages import check_language
from sbx.protocol.runs import Event
from sbx.protocol.surroundings import Surroundings
from sbx.runtime.conversation import Conversation
from sbx.runtime.snapshots.checkpoints import Checkpoint
from sbx.runtime.snapshots.dry_run import DryRun
from sbx.service.agent_models import ModelSource
from sbx.service.caller import Caller
from sbx.service.external_tools import is_allowed_in, scope_of
from sbx.service.models import SandboxView
from sbx.service.projects.projects import Project, mode_in
from sbx.service.rerun import fresh_sandbox
from sbx.service.run import RunHandle, RunRequest
from sbx.service.runs import Runs
from sbx.service.service import Service
from sbx.store import agent_runs, chats
from sbx.store.agent_runs import AgentRunRow
from sbx.store.chats import ChatRow
from sbx.store.messages import Messages


class AgentRequest(ChatAsk, frozen=True, kw_only=True):
    """A message to the agent of a conversation, on behalf of `caller` and within their bounds.

    `session` and `chat` exist. `scope` is the permission that opens the sandbox. `after_seq`: the
    last message before this run.
    """

    caller: Caller
    session: SandboxView
    chat: ChatRow
    project: Project | None = None
    profile: AgentProfile = NO_PROFILE
    profile_version: int | None = None
    scope: str = "execute"
    after_seq: int = 0

    @property
    def key(self) -> Key:
        return self.chat.key

    @property
    def size(self) -> int:
        return super().size + len(self.profile.instructions)

    @property
    def price(self) -> Price | None:
        return self.profile.per_token

    @property
    def start_fields(self) -> Json:
        place = {
            "session_id": self.session.session_id,
            "sandbox_session_id": self.session.session_id,
            "sandbox_id": self.session.id,
            "project_id": self.chat.project_id,
            "after_seq": self.after_seq,
            "agent_version": self.profile_version,
        }
        return {name: value for name, value in place.items() if value is not None}


class Invoke(AgentRequest, frozen=True, kw_only=True):
    """One call of a tool by a program, without a model. A conversation may have many at once."""

    tool: Tool
    call: ToolCall

    @property
    def key(self) -> Key:
        return self.owner, self.call.id


class AgentRunFactory(Struct, frozen=True):
    """The parts that all runs of agents share. `tools` write no files of sbx into a project."""

    service: Service
    models: ModelSource
    tools: Tools
    messages: Messages
    approvals: Approvals
    external: ExternalTools

    @asynccontextmanager
    async def agent(self, run: ChatRun) -> AsyncIterator[Agent]:
        """Yield the agent of a run. On exit the store has the end of the run."""
        request = run.ask
        assert isinstance(request, AgentRequest)
        async with AsyncExitStack() as stack:
            model = await stack.enter_async_context(self._model(request))
            sandbox = await self.open_sandbox(request, stack)
            history: MessageHistory = MemoryHistory()  # calls of programs are not part of a chat
            if not isinstance(request, Invoke):
                history = StoredHistory(self.messages, request.chat.id)
                await stack.enter_async_context(self._recorded(run, request, model))
            yield Agent(
                sandbox,
                model,
                tools=await self._tools(request, model),
                approvals=self.approvals,
                history=history,
                permissions=_permissions(request, sandbox),
                instructions=request.profile.instructions,
                budget=request.profile.budget,
                place=_place(request),
                changes=partial(chats.changes_setting, self.service.store, request.chat.id),
            )

    async def _tools(self, request: AgentRequest, model: Model) -> Tools:
        if isinstance(request, Invoke):  # of a program, which needs no agent
            return Tools([request.tool])
        external = await self.external.tools(
            (request.owner, request.session.user_id),
            partial(is_allowed_in, request.session),
            request.profile.external,
        )
        tools = request.profile.select(self.tools, external)
        return request.profile.with_delegation(
            tools,
            model,
            partial(self._new_sandbox, request),
            lambda sandbox: _permissions(replace(request, project=None), sandbox),
        )

    @asynccontextmanager
    async def _new_sandbox(self, request: AgentRequest) -> AsyncIterator[ToolSandbox]:
        """Yield a sandbox like that of a session, for a sub-agent, and delete it on exit."""
        async with fresh_sandbox(self.service, request.session) as fresh:
            sandbox = AgentSandbox(self.service.runs, fresh.caller, fresh.id, fresh.conversation)
            try:
                yield sandbox
            finally:
                await sandbox.close()

    async def open_sandbox(self, request: AgentRequest, stack: AsyncExitStack) -> ToolSandbox:
        """Return the conversation in its session or its project. `stack` holds its lease."""
        service, session, project = self.service, request.session, request.project
        if request.scope != "files:read":
            service.recording.check(runs=request.scope == "execute")
        use = await stack.enter_async_context(
            service.sandboxes.using(
                request.caller,
                session.id,
                scope=request.scope,
                starts=project is None and request.scope == "execute",
                conversation=request.conversation_id,
            )
        )
        conversation = use.conversation(request.conversation_id)
        if project is None:
            sandbox = AgentSandbox(service.runs, request.caller, session.id, conversation)
            stack.push_async_callback(sandbox.close)
            return sandbox
        return await stack.enter_async_context(
            service.projects.using(
                request.owner,
                project.id,
                request.chat.id,
                policy=session.policy_name,
                narrower=session.narrower,
                env=session.env,
                uploads=conversation,
            )
        )

    @asynccontextmanager
    async def _model(self, request: AgentRequest) -> AsyncIterator[Model]:
        """Yield the model of a request. The call of a program is a model with one answer."""
        if isinstance(request, Invoke):
            yield ReplayModel([Response(tool_calls=(request.call,), stop="tools")], name="none")
            return
        chosen = request.profile.model
        async with self.models.model(request.model or chosen.name, chosen.options) as model:
            yield model

    @asynccontextmanager
    async def _recorded(
        self, run: ChatRun, request: AgentRequest, model: Model
    ) -> AsyncIterator[None]:
        service = self.service
        row = AgentRunRow(
            id=run.run_id,
            chat_id=request.chat.id,
            model=model.name,
            max_steps=request.max_steps,
            started_at=service.clock.now(),
        )
        await agent_runs.begin(service.store, row)
        try:
            yield
        finally:
            end = run.end
            await agent_runs.end(
                service.store,
                run.run_id,
                reason=end.reason if end is not None else "error",
                at=service.clock.now(),
                usage=end.usage if end is not None else {},
                error=end.error if end is not None else None,
                report=run.progress.report,
            )


# -- the sandbox of an agent ----------------------------------------------------------------------


class AgentRun:
    """A requested run. If it was refused, `events` raises the error."""

    def __init__(self, starting: "asyncio.Task[RunHandle]") -> None:
        self._starting = starting

    async def events(self) -> AsyncGenerator[Event, None]:
        handle = await asyncio.shield(self._starting)
        async with aclosing(handle.events()) as events:
            async for _, event in events:
                yield event

    async def give_up(self) -> None:
        """Interrupt it. Do nothing if it was refused or has ended."""
        with suppress(SbxError):
            await (await asyncio.shield(self._starting)).interrupt()


class AgentSandbox:
    """One conversation of a session. `conversation` is leased while this object exists."""

    def __init__(
        self, runs: Runs, caller: Caller, sandbox_id: str, conversation: Conversation
    ) -> None:
        self.files = conversation.files
        self.uploads = conversation.uploads
        self.grants = conversation.grants
        self._runs = runs
        self._caller = caller
        self._sandbox_id = sandbox_id
        self._conversation = conversation
        self._requested: dict[AgentRun, None] = {}

    def start_run(self, code: str, *, timeout: float | None = None) -> AgentRun:
        return self._start(RunRequest("python", code, timeout_s=timeout))

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> AgentRun:
        return self._start(RunRequest("shell", command, timeout_s=timeout, cwd=cwd))

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> AgentRun:
        return self._start(RunRequest(check_language(language), code, timeout_s=timeout))

    async def give_up(self, run: AgentRun, /) -> None:
        await run.give_up()

    async def surroundings(self) -> Surroundings:
        return await self._conversation.surroundings()

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> DryRun:
        return await self._conversation.dry_run(command, timeout=timeout, cwd=cwd)

    async def checkpoint(self) -> Checkpoint:
        return await self._conversation.checkpoint()

    async def close(self) -> None:
        """Interrupt the runs that are left: no client follows them now."""
        await asyncio.gather(*(run.give_up() for run in list(self._requested)))

    def _start(self, request: RunRequest) -> AgentRun:
        starting = asyncio.create_task(
            self._runs.start(self._caller, self._sandbox_id, self._conversation.name, request)
        )
        run = AgentRun(starting)
        self._requested[run] = None
        starting.add_done_callback(_retrieve_error)
        return run


def _retrieve_error(starting: "asyncio.Task[RunHandle]") -> None:
    if not starting.cancelled():
        starting.exception()  # `events` raises it for the agent


# -- permissions ----------------------------------------------------------------------------------


class ScopedPermissions(Permissions, frozen=True, kw_only=True):
    """Permissions that also deny everything that `caller` may not do. `sandbox` knows whether a
    person has allowed the commands of this conversation meanwhile."""

    caller: Caller
    sandbox: ToolSandbox

    def of(self, tool: Tool, arguments: Arguments) -> Ruling:
        effect = tool.effect(arguments)
        if not self.caller.may(scope_of(tool, arguments)):
            return "deny"
        ruling = Permissions.of(self, tool, arguments)
        asks = ruling in ("changes", "ask_first") or (ruling == "ask" and effect == "command")
        if asks and commands_allowed(self.sandbox):
            return "allow"
        return ruling


def _permissions(request: AgentRequest, sandbox: ToolSandbox) -> ScopedPermissions:
    mode: Mode = "free"
    if request.project is not None:
        mode = mode_in(request.project)
    overrides = request.profile.overrides(in_project=mode != "free")
    return ScopedPermissions(mode, overrides=overrides, caller=request.caller, sandbox=sandbox)


def _place(request: AgentRequest) -> AgentContext:
    session, project = request.session, request.project
    return AgentContext(
        request.owner,
        request.conversation_id,
        user_id=session.user_id,
        agent_id=session.agent_id,
        project_id=project.id if project is not None else None,
    )
