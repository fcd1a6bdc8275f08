"""Tasks from templates, and the sources of external tools, in a service."""

from collections.abc import Mapping, Sequence
from typing import Any

from sbx.client.http import target
from sbx.client.requests import Json, ServiceRequests, without_none

_TOOLS = target("api", "v1", "tools")
_TASKS = target("api", "v1", "tasks")


class TaskCalls(ServiceRequests):
    """The calls of `Client` to tasks and to sources of external tools."""

    # -- tasks ------------------------------------------------------------------------------------

    async def task_templates(self) -> list[Json]:
        """Return the templates of the operator, also those with a `problem`."""
        return await self._items(f"{_TASKS}/templates")

    async def start_task(
        self,
        template: str,
        *,
        user_id: str,
        agent_id: str | None = None,
        parameters: Mapping[str, str] | None = None,
        inputs: Sequence[Mapping[str, str]] | None = None,
        at_once: int | None = None,
        cache: bool | None = None,
    ) -> Json:
        """Start a task for one input, or for each of `inputs`, and return at once. `task` has the
        states. With `cache=False` no earlier result is used. Raise NotFound `task_not_found`,
        BadRequest `invalid_parameters`, Unavailable `too_many_tasks`, `invalid_task` and
        `model_not_configured`."""
        body = without_none(
            template=template,
            user_id=user_id,
            agent_id=agent_id,
            parameters=dict(parameters or {}),
            inputs=None if inputs is None else [dict(each) for each in inputs],
            at_once=at_once,
            cache=cache,
        )
        return await self._json("POST", _TASKS, body)

    async def tasks(self, limit: int = 50) -> list[Json]:
        """Return the tasks of the caller, the newest first."""
        reply = await self.request("GET", _TASKS, params={"limit": limit})
        items: list[Json] = reply["items"]
        return items

    async def task(self, task_id: str) -> Json:
        """Return a task with the state and the answer of each input. Raise NotFound."""
        return await self._json("GET", f"{_TASKS}{target(task_id)}")

    async def abort_task(self, task_id: str) -> bool:
        """End a task. Return False if it has already ended. Raise NotFound."""
        reply = await self._json("POST", f"{_TASKS}{target(task_id, 'abort')}")
        return bool(reply["aborted"])

    async def resume_task(self, task_id: str, *, at_once: int | None = None) -> Json:
        """Begin the inputs and steps of an ended task that are not done, and return at once. Raise
        NotFound, Conflict `task_in_progress`, `nothing_to_resume`, `task_erased` and
        `template_changed`."""
        path = f"{_TASKS}{target(task_id, 'resume')}"
        return await self._json("POST", path, without_none(at_once=at_once))

    # -- sources of external tools ----------------------------------------------------------------

    async def tool_sources(self) -> list[Json]:
        """Return the sources of external tools with their states. For the operator."""
        return await self._items(f"{_TOOLS}/sources")

    async def add_tool(self, name: str, source: Mapping[str, Any]) -> Json:
        """Register a source of external tools. For the operator. Raise BadRequest, Conflict
        `tool_exists`, Unavailable `invalid_tool` and `tools_not_writable`."""
        return await self._json("POST", _TOOLS, {"name": name, "source": dict(source)})

    async def remove_tool(self, name: str) -> None:
        """Remove a source of external tools; a second time does nothing. For the operator."""
        await self.request("DELETE", f"{_TOOLS}{target(name)}")
