"""The agents of a service, from the start of its service to its end."""

import asyncio
import logging
from contextlib import aclosing, suppress

from sbx.agent.approvals import Approvals
from sbx.agent.chats import ChatRun, Chats
from sbx.agent.history import StoredHistory, repair_history
from sbx.agent.settings import AgentSettings
from sbx.agent.tools.registry import Tools
from sbx.api.agent_v1.opening import AgentRunFactory
from sbx.api.agent_v1.source import ModelSource
from sbx.api.agent_v1.talk import AgentRequest
from sbx.errors import SbxError
from sbx.protocol.approvals import RESTART
from sbx.service.service import Service
from sbx.store import chats
from sbx.store.approvals import ApprovalStore
from sbx.store.chats import ChatRow
from sbx.store.messages import Messages

_log = logging.getLogger(__name__)
_APPROVAL_TIMEOUT_S = 600.0
_LAST_WORDS_S = 2.0


class Agents:
    """Who runs, who asks, who is told. Ends with the service, before anything that it needs.

    `settings`: None, or the error that says what is wrong with them, where no model is configured;
    then a chat is refused, and all else works.
    """

    def __init__(self, service: Service, settings: AgentSettings | SbxError | None = None) -> None:
        known = settings if isinstance(settings, AgentSettings) else None
        self.models = ModelSource(settings)
        self.tools = Tools()
        self.messages = Messages(service.store, service.clock)
        self.approvals = Approvals(
            ApprovalStore(service.store, service.pending),
            service.clock,
            timeout_s=known.approval_timeout if known is not None else _APPROVAL_TIMEOUT_S,
        )
        self.opening = AgentRunFactory(
            service, self.models, self.tools, self.messages, self.approvals
        )
        self.chats = Chats(self.opening.agent, service.clock)
        self._service = service
        self._starting = asyncio.Lock()
        self._started = False
        service.on_close(self.close)
        service.sandboxes.on_delete(self.leave)
        service.sandboxes.on_stop(self.abort)

    async def start(self) -> None:
        """Deny what an earlier process left pending, and say so in the histories. A second time
        does nothing."""
        async with self._starting:
            if not self._started:
                await self._recover()
                self._started = True

    async def close(self) -> None:
        """End every run; what waits for a person is denied by `restart`, as its history says."""
        await asyncio.gather(*(self._deny(run) for run in self.chats.every()))
        await self.chats.close()
        await self.models.close()

    async def abort(self, sandbox_id: str, conversation: str | None) -> None:
        """End what agents do in a conversation, or in all of a sandbox; what waits is denied."""
        await asyncio.gather(
            *(run.abort() for run in self.chats.every() if _is_of(run, sandbox_id, conversation))
        )

    async def leave(self, sandbox_id: str, conversation: str | None) -> None:
        """The same for what is about to go, with all that they had there."""
        await self.abort(sandbox_id, conversation)
        for row in await chats.in_projects(self._service.store, sandbox_id):
            if conversation in (None, row.conversation_id):
                await self._service.projects.close_conversation(row.owner, row.id)

    def history(self, chat: ChatRow) -> StoredHistory:
        return StoredHistory(self.messages, chat.id)

    async def _deny(self, run: ChatRun) -> None:
        """What it waits for; and see that the agent has taken note."""
        try:
            denied = await self.approvals.abort(run.run_id, by=RESTART)
        except SbxError as error:  # no reason to go on: the next start denies them
            _log.error("what %s waits for was not denied: %s", run.run_id, error.message)
            return
        calls = {one.tool_call_id for one in denied}
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S), aclosing(run.events()) as events:
                while calls and (event := await anext(events, None)) is not None:
                    if event[1]["type"] == "tool_end":
                        calls.discard(event[1]["tool_call_id"])

    async def _recover(self) -> None:
        why: dict[tuple[str, str, str | None, str | None], dict[str, str]] = {}
        for denied in await self.approvals.recover():
            if denied.decision is not None:
                at = denied.owner, denied.conversation_id, denied.user_id, denied.agent_id
                why.setdefault(at, {})[denied.tool_call_id] = denied.decision.why
        for (owner, name, user, agent), calls in why.items():
            store = self._service.store
            for row in await chats.named(store, owner, name, user_id=user, agent_id=agent):
                await repair_history(self.history(row), calls)


def _is_of(run: ChatRun, sandbox_id: str, conversation: str | None) -> bool:
    talk = run.ask
    return (
        isinstance(talk, AgentRequest)
        and talk.session.id == sandbox_id
        and conversation in (None, talk.conversation_id)
    )
