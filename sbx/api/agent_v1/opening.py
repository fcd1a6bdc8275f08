"""What one run of an agent works with: opened for it, recorded, and closed after it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from sbx.agent.agent import Agent
from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.chats import ChatRun
from sbx.agent.history import MemoryHistory, MessageHistory, StoredHistory
from sbx.agent.messages import Response
from sbx.agent.models import Model
from sbx.agent.models.replay import ReplayModel
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools.registry import Tools
from sbx.api.agent_v1.held import AgentSandbox
from sbx.api.agent_v1.scopes import ScopedPermissions
from sbx.api.agent_v1.source import ModelSource
from sbx.api.agent_v1.talk import AgentRequest, Invoke
from sbx.service.service import Service
from sbx.store import agent_runs, chats
from sbx.store.agent_runs import AgentRunRow
from sbx.store.messages import Messages


@dataclass(frozen=True, slots=True)
class AgentRunFactory:
    """What all runs of agents share. `tools`: those that write nothing of ours into a project."""

    service: Service
    models: ModelSource
    tools: Tools
    messages: Messages
    approvals: Approvals

    @asynccontextmanager
    async def agent(self, run: ChatRun) -> AsyncIterator[Agent]:
        """The agent of a run. When this is left, the run's end is in the store."""
        talk = run.ask
        assert isinstance(talk, AgentRequest)
        async with AsyncExitStack() as held:
            model = await held.enter_async_context(self._model(talk))
            box = await self.box(talk, held)
            history: MessageHistory = MemoryHistory()  # what a program calls is no part of a talk
            if not isinstance(talk, Invoke):
                history = StoredHistory(self.messages, talk.chat.id)
                await held.enter_async_context(self._recorded(run, talk, model))
            yield Agent(
                box,
                model,
                tools=self.tools,
                approvals=self.approvals,
                history=history,
                permissions=_permissions(talk, box),
                place=_place(talk),
                changes=partial(chats.changes_setting, self.service.store, talk.chat.id),
            )

    async def box(self, talk: AgentRequest, held: AsyncExitStack) -> ToolSandbox:
        """The conversation in its session, or in its project; in use until `held` is left."""
        service, session, name, project = (
            self.service,
            talk.session,
            talk.conversation_id,
            talk.project,
        )
        if talk.scope != "files:read":
            service.recording.check(runs=talk.scope == "execute")
        use = await held.enter_async_context(
            service.sandboxes.using(
                talk.caller,
                session.id,
                scope=talk.scope,
                starts=project is None and talk.scope == "execute",
                conversation=name,
            )
        )
        kept = use.conversation(name)
        if project is None:
            box = AgentSandbox(service.runs, talk.caller, session.id, kept)
            held.push_async_callback(box.close)
            return box
        return await held.enter_async_context(
            service.projects.using(
                talk.owner,
                project.id,
                talk.chat.id,
                policy=session.profile,
                narrower=session.narrower,
                env=session.env,
                uploads=kept,
            )
        )

    @asynccontextmanager
    async def _model(self, talk: AgentRequest) -> AsyncIterator[Model]:
        """A program that calls a tool is a model that knows what it wants."""
        if isinstance(talk, Invoke):
            yield ReplayModel([Response(tool_calls=(talk.call,), stop="tools")], name="none")
            return
        async with self.models.model(talk.model) as model:
            yield model

    @asynccontextmanager
    async def _recorded(
        self, run: ChatRun, talk: AgentRequest, model: Model
    ) -> AsyncIterator[None]:
        service = self.service
        row = AgentRunRow(
            id=run.run_id,
            chat_id=talk.chat.id,
            model=model.name,
            max_steps=talk.max_steps,
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
            )


def _permissions(talk: AgentRequest, box: ToolSandbox) -> ScopedPermissions:
    asks = talk.project is not None and talk.project.sandbox_enabled
    return ScopedPermissions("project" if asks else "free", caller=talk.caller, box=box)


def _place(talk: AgentRequest) -> AgentContext:
    session, project = talk.session, talk.project
    return AgentContext(
        talk.owner,
        talk.conversation_id,
        user_id=session.user_id,
        agent_id=session.agent_id,
        project_id=project.id if project is not None else None,
    )
