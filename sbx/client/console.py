"""The objects that a person observes and manages in a service: conversations with agents, logins of
browsers, templates, policies, the network of a sandbox."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sbx.client import records
from sbx.client.errors import decode
from sbx.client.http import target
from sbx.client.requests import Json, ServiceRequests, without_none
from sbx.protocol.pages import Page

_CONVERSATIONS = target("api", "v1", "conversations")
_LOGINS = target("api", "v1", "console", "sessions")
_QUARANTINE = target("api", "v1", "quarantine")
_TEMPLATES = target("api", "v1", "templates")


@dataclass(frozen=True, slots=True)
class AgentConversation:
    """A conversation with an agent. Times are in seconds of the epoch; `expires_at` is that of its
    session. `run_id` is that of its active run, and `pending` the number of calls that wait for a
    decision."""

    conversation_id: str
    title: str
    session_id: str
    sandbox_id: str | None
    user_id: str
    agent_id: str
    project_id: str | None
    created_at: float
    last_used_at: float
    expires_at: float | None
    run_id: str | None
    pending: int


class ConsoleCalls(ServiceRequests):
    """The calls of `Client` that the console also uses."""

    async def me(self) -> Json:
        """Return who you are for the service: your rights, your limits and its defaults."""
        return await self._json("GET", "/api/v1/me")

    async def changes(self) -> AsyncGenerator[Json, None]:
        """Yield from now on what changes: sandboxes, approvals, chats, conversations, projects and
        uploads. Each is an object with a `type`. Changes during a lost connection are missing."""
        async with aclosing(self.follow("GET", "/api/v1/events")) as events:
            async for _, event in events:
                yield event

    # -- logins of browsers -----------------------------------------------------------------------

    async def make_login_code(
        self, *, token: str | None = None, operator: bool = True, path: str = "/console/"
    ) -> Json:
        """Create a code with which one browser can log in once, within a minute; `sbx console`
        makes a link of it. With `token` the login has the rights of that token. Without `operator`
        it has no rights of an operator. Raise NotFound `no_console`, Unavailable
        `too_many_codes`."""
        body = without_none(token=token, operator=operator, path=path)
        return await self._json("POST", "/api/v1/console/codes", body)

    async def logins(self) -> list[Json]:
        """Return the browsers that are logged in, the oldest first."""
        return await self._items(_LOGINS)

    async def end_login(self, login_id: str) -> None:
        """End the login of a browser. Raise NotFound."""
        await self.request("DELETE", f"{_LOGINS}{target(login_id)}")

    # -- conversations with agents ----------------------------------------------------------------

    async def agent_conversations(
        self,
        *,
        search: str | None = None,
        project_id: str | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[AgentConversation]:
        """Return the conversations, the last used first. `search` is a part of a title."""
        params = {
            "q": search,
            "project_id": project_id,
            "user_id": user_id,
            "agent_id": agent_id,
            "limit": limit,
            "cursor": cursor,
        }
        return records.page(await self.request("GET", _CONVERSATIONS, params=params), _conversation)

    async def agent_conversation(self, conversation_id: str) -> AgentConversation:
        """Return one conversation. Raise NotFound."""
        path = f"{_CONVERSATIONS}{target(conversation_id)}"
        return _conversation(await self._json("GET", path))

    async def rename_conversation(self, conversation_id: str, title: str) -> AgentConversation:
        """Set the title (1 to 200 characters). Raise NotFound, BadRequest."""
        path = f"{_CONVERSATIONS}{target(conversation_id)}"
        return _conversation(await self._json("PATCH", path, {"title": title}))

    async def delete_conversation(self, conversation_id: str) -> None:
        """End its run, and delete its messages, kernel, history and files. The directory of a
        project stays. Raise NotFound."""
        await self.request("DELETE", f"{_CONVERSATIONS}{target(conversation_id)}")

    # -- templates of prompts ---------------------------------------------------------------------

    async def templates(self) -> list[Json]:
        """Return the templates, those of sbx first."""
        return await self._items(_TEMPLATES)

    async def create_template(
        self,
        name: str,
        prompt: str,
        *,
        description: str = "",
        variables: Sequence[Mapping[str, str]] = (),
        project_id: str | None = None,
        max_steps: int | None = None,
    ) -> Json:
        """Create a template. `{{name}}` in the prompt stands for a variable, which has `name`, and
        optionally `label` and `default`. Raise BadRequest, NotFound for the project."""
        body = {
            "name": name,
            "prompt": prompt,
            "description": description,
            "variables": [dict(variable) for variable in variables],
            "project_id": project_id,
            "max_steps": max_steps,
        }
        return await self._json("POST", _TEMPLATES, body)

    async def template(self, template_id: str) -> Json:
        """Return one template. Raise NotFound."""
        return await self._json("GET", f"{_TEMPLATES}{target(template_id)}")

    async def change_template(self, template_id: str, changes: Mapping[str, Any]) -> Json:
        """Change fields of `create_template`. Raise NotFound, BadRequest, Conflict `built_in`."""
        return await self._json("PATCH", f"{_TEMPLATES}{target(template_id)}", dict(changes))

    async def delete_template(self, template_id: str) -> None:
        """Delete a template. A second call does nothing. Raise Conflict `built_in`."""
        await self.request("DELETE", f"{_TEMPLATES}{target(template_id)}")

    # -- policies and directories -----------------------------------------------------------------

    async def policies(self) -> list[Json]:
        """Return the policies that a sandbox can have, also those with a `problem`."""
        return await self._items("/v1/policies")

    async def policy(self, name: str) -> Json:
        """Return every value of a policy, and its file to an operator. Raise NotFound."""
        return await self._json("GET", target("v1", "policies", name))

    async def project_directories(self, below: str | None = None) -> list[str]:
        """Return the directories in one that may be a project, or those of the setting
        `project_dirs`. Raise Denied `not_granted`."""
        path = "/api/v1/projects/directories"
        reply = await self.request("GET", path, params={"below": below})
        return [item["path"] for item in reply["items"]]

    # -- the quarantine of projects ---------------------------------------------------------------

    async def quarantine(self) -> list[Json]:
        """Return the files of your projects that a program of the host would obey. Raise
        Unavailable `quarantine_elsewhere`."""
        return await self._items(_QUARANTINE)

    async def quarantined(self, item_id: str, path: str = "") -> Json:
        """Return one of them with its content. `path` is one in an item that is a directory. Raise
        NotFound."""
        path = target("api", "v1", "quarantine", item_id, params={"path": path})
        return await self._json("GET", path)

    async def restore_quarantined(self, item_id: str) -> str:
        """Copy it to its place, where the host obeys it from then on; return the path. Raise
        NotFound, Conflict `quarantine_in_use` and `file_exists`."""
        path = f"{_QUARANTINE}{target(item_id, 'restore')}"
        return str((await self._json("POST", path))["path"])

    async def drop_quarantined(self, item_id: str) -> None:
        """Delete it. Raise NotFound, Conflict `quarantine_in_use`."""
        await self.request("DELETE", f"{_QUARANTINE}{target(item_id)}")

    # -- sandboxes --------------------------------------------------------------------------------

    async def details(self, sandbox_id: str) -> Json:
        """Return a sandbox with its owner, session, conversations, kernels and usage. This does not
        count as a use. Raise NotFound."""
        path = target("v1", "sandboxes", sandbox_id, params={"detail": True})
        return await self._json("GET", path)

    async def ended_sandboxes(self) -> list[Json]:
        """Return the records of sandboxes that were deleted within 30 days, with the cause."""
        params = {"detail": True, "ended": True, "limit": 1}
        reply = await self.request("GET", "/v1/sandboxes", params=params)
        items: list[Json] = reply["ended"]
        return items

    async def network_decisions(self, sandbox_id: str) -> list[Json]:
        """Return the last decisions of the proxy of an open sandbox (at most 500), the newest
        first. This does not count as a use. Raise NotFound."""
        return await self._items(target("v1", "sandboxes", sandbox_id, "network"))

    async def recorded_run(self, sandbox_id: str, run_id: str) -> Json:
        """Return one run that has ended, with its code. Raise NotFound `run_not_kept`."""
        return await self._json("GET", target("v1", "sandboxes", sandbox_id, "runs", run_id))

    async def complete(
        self,
        sandbox_id: str,
        code: str,
        cursor: int,
        *,
        conversation: str = "default",
        context: str = "default",
    ) -> Json:
        """Complete code for a live kernel: `matches`, each of which replaces the characters from
        `start` to `end`. Raise Conflict `busy`, NotFound."""
        question = {"code": code, "cursor": cursor}
        return await self._ask(sandbox_id, conversation, context, "complete", question)

    async def describe(
        self,
        sandbox_id: str,
        code: str,
        cursor: int,
        *,
        conversation: str = "default",
        context: str = "default",
    ) -> Json:
        """Describe the object at the cursor: `found`, and `data` by media type. Raise as
        `complete`."""
        question = {"code": code, "cursor": cursor}
        return await self._ask(sandbox_id, conversation, context, "inspect", question)

    async def _ask(
        self, sandbox_id: str, conversation: str, context: str, verb: str, question: Json
    ) -> Json:
        kernel = ("conversations", conversation, "contexts", context)
        return await self._json(
            "POST", target("v1", "sandboxes", sandbox_id, *kernel, verb), question
        )


def _conversation(reply: Any) -> AgentConversation:
    def read(data: Any) -> AgentConversation:
        names = AgentConversation.__dataclass_fields__.keys() - {"run_id"}
        run_id = data["run"]["run_id"] if data["run"] is not None else None
        return AgentConversation(**{name: data[name] for name in names}, run_id=run_id)

    return decode("conversation", read, reply)
