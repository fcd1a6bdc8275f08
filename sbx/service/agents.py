"""The agents of a service, from the start of its service to its end, and their conversations."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

from msgspec.structs import replace

from sbx.agent.approvals import Approvals
from sbx.agent.changing import denial
from sbx.agent.chats import ChatRun, Chats
from sbx.agent.external.registry import ExternalTools
from sbx.agent.history import StoredHistory, repair_history
from sbx.agent.progress import EndedRun, RunProgress, combined_report
from sbx.agent.settings import AgentSettings
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolResult
from sbx.errors import Conflict, NotFound, SbxError
from sbx.protocol.agent import Json
from sbx.protocol.approvals import RESTART, Approval, ApprovalDecision
from sbx.protocol.changes import ChangesSetting
from sbx.protocol.pages import Page
from sbx.service.agent_models import ModelSource
from sbx.service.agent_profiles import StoredProfile
from sbx.service.agent_runs import AgentRequest, AgentRunFactory, Invoke
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.notices import Notice
from sbx.service.projects.client import RemoteSession
from sbx.service.projects.projects import Project
from sbx.service.projects.session import ProjectSession
from sbx.service.rerun import FRESH
from sbx.service.service import Service
from sbx.service.tasks import Tasks
from sbx.store import agent_runs, chats
from sbx.store.agent_runs import AgentRunRow
from sbx.store.approvals import ApprovalStore
from sbx.store.chats import ChatFilter, ChatRow
from sbx.store.messages import MessageRow, Messages

__all__ = [
    "AgentRunRow",
    "Agents",
    "ChatFilter",
    "ChatRow",
    "MessageRow",
    "no_conversation",
    "profile_of",
    "undoing",
]

_log = logging.getLogger(__name__)
_APPROVAL_TIMEOUT_S = 600.0
_TITLE_MAX = 80
_READS = ("execute", "files:read")  # the scopes of the routes that read the work of agents
_DENIALS_S = 2.0  # for agents to take note of denials at the end of the service


class Agents:
    """The chats, models, tools and approvals of a service. They close before its other parts.

    `settings`: None, or the error of the settings. Then chats are refused, and all else works.
    """

    def __init__(self, service: Service, settings: AgentSettings | SbxError | None = None) -> None:
        valid = settings if isinstance(settings, AgentSettings) else None
        self.models = ModelSource(settings)
        self.tools = Tools()
        self.tasks = Tasks(service.store, service.clock, service.settings.tasks_dir)
        self.external = ExternalTools(service.settings.tools_dir, service.data_dir / "tools")
        self.messages = Messages(service.store, service.clock)
        self.approvals = Approvals(
            ApprovalStore(service.store, service.pending),
            service.clock,
            timeout_s=valid.approval_timeout if valid is not None else _APPROVAL_TIMEOUT_S,
            on_change=self._approval_changed,
        )
        self._factory = AgentRunFactory(
            service, self.models, self.tools, self.messages, self.approvals, self.external
        )
        self.chats = Chats(self._factory.agent, service.clock, on_change=self._run_changed)
        self._service = service
        self._starting = asyncio.Lock()
        self._started = False
        service.on_close(self.close)
        service.sandboxes.on_delete(self.release)
        service.sandboxes.on_stop(self.abort)

    async def start(self) -> None:
        """Deny the approvals that an earlier process left pending, also in the histories, and
        delete its fresh sandboxes. A second call does nothing."""
        async with self._starting:
            if not self._started:
                await self._recover()
                await self.external.start()
                self._started = True

    async def close(self) -> None:
        """End every run. Deny the pending approvals by `restart`, also in the histories."""
        await self.tasks.close()
        await asyncio.gather(*(self._deny(run) for run in self.chats.every()))
        await self.chats.close()
        await self.external.close()
        await self.models.close()

    async def abort(self, sandbox_id: str, conversation: str | None) -> None:
        """End the runs of agents in a conversation, or in a sandbox. Deny their approvals."""
        await asyncio.gather(
            *(run.abort() for run in self.chats.every() if _is_in(run, sandbox_id, conversation))
        )

    async def release(self, sandbox_id: str, conversation: str | None) -> None:
        """Abort before a deletion, and close the sessions of projects that came through here."""
        await self.abort(sandbox_id, conversation)
        for row in await chats.in_projects(self._service.store, sandbox_id):
            if conversation in (None, row.conversation_id):
                await self._service.projects.close_conversation(row.owner, row.id)

    # -- conversations ----------------------------------------------------------------------------

    async def find_chat(
        self,
        caller: Caller,
        conversation_id: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
    ) -> ChatRow:
        """Return the only conversation with this id within the caller's bounds.

        Several users and agents may each have one: `user_id` and `agent_id` choose.
        Raise NotFound, Conflict `conversation_ambiguous`.
        """
        rows = await chats.named(
            self._service.store, caller.owner, conversation_id, user_id=user_id, agent_id=agent_id
        )
        visible = [row for row in rows if caller.sees(row.user_id, row.agent_id, conversation_id)]
        if not visible:
            raise no_conversation(conversation_id)
        if len(visible) > 1:
            raise Conflict(
                f"several users or agents have a conversation {conversation_id}",
                code="conversation_ambiguous",
                hint="name one with the query parameters user_id and agent_id",
                details={"conversation_id": conversation_id},
            )
        return visible[0]

    async def ensure_chat(
        self,
        caller: Caller,
        session: SandboxView,
        conversation_id: str,
        project_id: str | None = None,
        message: str | None = None,
    ) -> tuple[ChatRow, Project | None]:
        """Return the row of a conversation with an agent, created if need be, and its project. The
        first `message` gives it a title. A new one keeps the current profile of its agent.

        A token may continue in the project of a conversation, but not begin one there. Raise
        NotFound, Conflict `conversation_of_another`, Unavailable `invalid_profile`.
        """
        now, store = self._service.clock.now(), self._service.store
        ids = {"user_id": session.user_id or "", "agent_id": session.agent_id or ""}
        profile_id = None  # an existing conversation keeps its version
        if not await chats.named(store, caller.owner, conversation_id, **ids):
            profiles = self._service.agent_profiles
            profile_id = await profiles.version_for_chat(caller.owner, ids["agent_id"])
        new = ChatRow(
            id=f"talk-{secrets.token_hex(8)}",
            owner=caller.owner,
            conversation_id=conversation_id,
            **ids,
            created_at=now,
            last_used_at=now,
            business_domain_id=session.business_domain_id,
            sandbox_id=session.id,
            project_id=project_id,
            title=_title(message),
            profile_id=profile_id,
        )
        row = await chats.ensure(store, new)
        self.conversation_changed(row)
        if row.project_id is None:
            return row, None
        return row, await self._service.projects.get(caller.owner, row.project_id)

    async def list_chats(
        self, caller: Caller, chosen: ChatFilter, *, limit: int
    ) -> Page[tuple[ChatRow, int]]:
        """Return conversations within the caller's bounds, with the number of their pending
        approvals, the last used first."""
        bounds = _bounds(caller)
        if any(getattr(chosen, name) not in (None, bound) for name, bound in bounds.items()):
            return Page([])
        chosen = replace(chosen, **bounds)
        now = self._service.clock.now()
        rows = await chats.page(self._service.store, chosen, now=now, limit=limit + 1)
        last = rows[limit - 1][0] if len(rows) > limit else None
        cursor = f"{last.last_used_at!r} {last.id}" if last is not None else None
        return Page(rows[:limit], cursor)

    async def rename(self, chat: ChatRow, title: str) -> None:
        await chats.set_title(self._service.store, chat.id, title)
        self.conversation_changed(chat)

    async def delete_chat(self, caller: Caller, chat: ChatRow) -> None:
        """Abort its run, and delete the conversation: see `Deletions.chat`."""
        await self.chats.abort(chat.key)
        await self._service.deletions.chat(caller, chat)
        self.conversation_changed(chat, "conversation.deleted")

    def history(self, chat: ChatRow) -> StoredHistory:
        return StoredHistory(self.messages, chat.id)

    async def runs(
        self, chat: ChatRow, *, limit: int, before: int | None = None
    ) -> Sequence[AgentRunRow]:
        """Return the runs of its agent, the newest first. `before` is a `seq`."""
        return await agent_runs.list_for_chat(
            self._service.store, chat.id, limit=limit, before=before
        )

    async def run(self, chat: ChatRow, run_id: str) -> tuple[AgentRunRow, RunProgress | None]:
        """Return one run of its agent, and its progress while it is active. Raise NotFound."""
        row = await agent_runs.get(self._service.store, chat.id, run_id)
        if row is None:
            raise NotFound(f"the agent of this conversation had no run {run_id[:80]!r}")
        active = self.chats.running(chat.key)
        running = active is not None and active.run_id == run_id
        return row, active.progress if active is not None and running else None

    def active_runs(self, caller: Caller) -> list[tuple[ChatRun, AgentRequest]]:
        """Return the active runs of conversations within the bounds of the caller, the oldest
        first."""
        active = []
        for run in self.chats.every():
            request = run.ask
            if isinstance(request, AgentRequest) and not isinstance(request, Invoke):
                row = request.chat
                is_visible = caller.sees(row.user_id, row.agent_id, row.conversation_id)
                if row.owner == caller.owner and is_visible:
                    active.append((run, request))
        return sorted(active, key=lambda each: each[0].started_at)

    async def report(self, caller: Caller, *, since: float, agent_id: str | None) -> Json:
        """Return the report about the ended runs within the bounds of the caller."""
        bounds = _bounds(caller)
        if agent_id is not None and bounds.setdefault("agent_id", agent_id) != agent_id:
            return combined_report(())
        rows = await agent_runs.ended_of_owner(
            self._service.store, caller.owner, since=since, bounds=bounds
        )
        return combined_report(map(_ended, rows))

    async def changes_setting(self, chat: ChatRow) -> ChangesSetting:
        return await chats.changes_setting(self._service.store, chat.id)

    async def set_changes(self, chat: ChatRow, setting: ChangesSetting) -> None:
        await chats.set_changes(self._service.store, chat.id, setting)

    async def allow_commands(
        self, caller: Caller, session: SandboxView, chat: ChatRow, project: Project
    ) -> None:
        """Execute the commands of a conversation in its project without asking."""
        request = AgentRequest(
            chat.owner,
            chat.conversation_id,
            None,
            caller=caller,
            session=session,
            chat=chat,
            project=project,
        )
        async with AsyncExitStack() as stack:
            sandbox = await self._factory.open_sandbox(request, stack)
            # A project without a sandbox never asks.
            if isinstance(sandbox, ProjectSession | RemoteSession):
                await sandbox.allow_commands()

    # -- notices -----------------------------------------------------------------------------------

    def conversation_changed(self, row: ChatRow, kind: str = "conversation.changed") -> None:
        """Publish that the list of conversations has changed."""
        body = {"type": kind, "conversation_id": row.conversation_id}
        self._service.notices.publish(
            Notice(row.owner, body, _READS, row.user_id, row.agent_id, row.conversation_id)
        )

    def _run_changed(self, run: ChatRun) -> None:
        request = run.ask
        if not isinstance(request, AgentRequest) or isinstance(request, Invoke):
            return
        body = {"conversation_id": request.conversation_id, "run_id": run.run_id}
        if run.end is None:
            body |= {"type": "chat.started"}
        else:
            body |= {"type": "chat.ended", "reason": run.end.reason}
        row = request.chat
        self._service.notices.publish(
            Notice(row.owner, body, _READS, row.user_id, row.agent_id, row.conversation_id)
        )

    def _approval_changed(self, approval: Approval, decision: ApprovalDecision | None) -> None:
        body: dict[str, Any] = {
            "tool_call_id": approval.tool_call_id,
            "conversation_id": approval.conversation_id,
        }
        if decision is None:
            body |= {"type": "approval.pending"}
        else:
            body |= {
                "type": "approval.decided",
                "approved": decision.approved,
                "by": decision.by,
                "remembered": decision.remembered,
            }
        place = approval.user_id, approval.agent_id, approval.conversation_id
        self._service.notices.publish(Notice(approval.owner, body, ("execute",), *place))

    # -- approvals --------------------------------------------------------------------------------

    async def _deny(self, run: ChatRun) -> None:
        """Deny the approvals of a run, and wait until its agent has taken note of them."""
        try:
            denied = await self.approvals.abort(run.run_id, by=RESTART)
        except SbxError as error:  # not a reason to wait: the next start denies them
            _log.error("the approvals of %s were not denied: %s", run.run_id, error.message)
            return
        calls = {approval.tool_call_id for approval in denied}
        with suppress(TimeoutError):
            async with asyncio.timeout(_DENIALS_S), aclosing(run.events()) as events:
                while calls and (event := await anext(events, None)) is not None:
                    if event[1]["type"] == "tool_end":
                        calls.discard(event[1]["tool_call_id"])

    async def _recover(self) -> None:
        await _delete_fresh_sandboxes(self._service)
        results: dict[tuple[str, str, str | None, str | None], dict[str, ToolResult]] = {}
        for denied in await self.approvals.recover():
            if denied.decision is not None:
                key = denied.owner, denied.conversation_id, denied.user_id, denied.agent_id
                results.setdefault(key, {})[denied.tool_call_id] = denial(denied)
        for (owner, name, user, agent), calls in results.items():
            store = self._service.store
            for row in await chats.named(store, owner, name, user_id=user, agent_id=agent):
                await repair_history(self.history(row), calls)


async def _delete_fresh_sandboxes(service: Service) -> None:
    for sandbox in service.sandboxes.every():
        if sandbox.row.labels == FRESH:
            try:
                await service.sandboxes.end(sandbox, "requested")
            except SbxError as error:  # its time to live ends it; the service must start
                _log.error("sandbox %s was not deleted: %s", sandbox.id, error.message)


def _bounds(caller: Caller) -> dict[str, Any]:
    """Return the columns of conversations that a token fixes."""
    names = ("user_id", "agent_id", "conversation_id")
    return {name: bound for name in names if (bound := getattr(caller, name)) is not None}


def _ended(row: AgentRunRow) -> EndedRun:
    seconds = max(0.0, (row.ended_at or row.started_at) - row.started_at)
    return EndedRun(row.reason or row.status, seconds, row.usage or {}, row.report)


def _title(message: str | None) -> str | None:
    """Return the first 80 characters of a message, in one line."""
    return " ".join(message.split())[:_TITLE_MAX].strip() or None if message else None


async def profile_of(
    service: Service, caller: Caller, user_id: str, agent_id: str, conversation_id: str
) -> tuple[StoredProfile | None, str | None]:
    """Return the profile that a message to this conversation uses, and the id of its project, also
    before the conversation is created. Raise Unavailable `invalid_profile`."""
    profiles, names = service.agent_profiles, {"user_id": user_id, "agent_id": agent_id}
    for row in await chats.named(service.store, caller.owner, conversation_id, **names):
        return await profiles.of_chat(row.profile_id), row.project_id
    return await profiles.find(caller.owner, agent_id), None


@asynccontextmanager
async def undoing(service: Service, row: ChatRow) -> AsyncIterator[None]:
    """Delete a chat again if it is new, and the request that created it is refused."""
    try:
        yield
    except SbxError:
        await chats.delete_unused(service.store, row)
        raise


def no_conversation(conversation_id: str) -> NotFound:
    return NotFound(
        f"no agent has a conversation {conversation_id[:80]!r}",
        details={"conversation_id": conversation_id[:400]},
    )


def _is_in(run: ChatRun, sandbox_id: str, conversation: str | None) -> bool:
    request = run.ask
    return (
        isinstance(request, AgentRequest)
        and request.session.id == sandbox_id
        and conversation in (None, request.conversation_id)
    )
