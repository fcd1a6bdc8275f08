"""Tasks from templates: an agent works on each input, in its own conversation.

    templates (files of the operator) ─► fill ─► one conversation for each input, few at a time

The states are in the store. Inputs that a service has not completed at its end are `interrupted`.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from sbx.agent.chats import ChatRun
from sbx.agent.task import FilledTask, TaskTemplate, fill_input, read_tasks
from sbx.aio import Clock
from sbx.errors import BadRequest, NotFound, SbxError, Unavailable
from sbx.store import Store, tasks
from sbx.store.tasks import TaskInputRow, TaskRow
from sbx.telemetry.host_paths import without_host_paths

__all__ = ["Begin", "TaskInputRow", "TaskRow", "Tasks", "no_task"]

_PER_OWNER = 20  # that are not complete
_RETRY_S = 1.0
_ANSWER_MAX = 8192  # characters; the conversation has the whole
_log = logging.getLogger(__name__)
# Starts the run of one input in the conversation with this id.
Begin = Callable[[str, FilledTask], Awaitable[ChatRun]]


class Tasks:
    """`directory`: that of the templates, which need not exist."""

    def __init__(self, store: Store, clock: Clock, directory: Path) -> None:
        self._store = store
        self._clock = clock
        self._directory = directory
        self._active: dict[str, tuple[str, asyncio.Task[None]]] = {}  # with the owner

    async def templates(self) -> Mapping[str, TaskTemplate | BadRequest]:
        """Return the templates by name, or the error of a file."""
        return await asyncio.to_thread(read_tasks, self._directory)

    async def valid_templates(self) -> Mapping[str, TaskTemplate]:
        """Return the templates by name, without files that have an error."""
        return {
            name: template
            for name, template in (await self.templates()).items()
            if not isinstance(template, BadRequest)
        }

    async def template(self, name: str) -> TaskTemplate:
        """Raise NotFound `task_not_found`, Unavailable `invalid_task` for a file that is not
        valid."""
        template = (await self.templates()).get(name)
        if template is None:
            raise NotFound(
                f"the template {name[:80]!r} does not exist",
                code="task_not_found",
                hint="GET /api/v1/tasks/templates lists them",
            )
        if isinstance(template, BadRequest):  # of the operator, and of no caller
            raise Unavailable(template.message, code="invalid_task", details=template.details)
        return template

    async def start(
        self, row: TaskRow, rows: Sequence[Mapping[str, str]], begin: Begin, at_once: int
    ) -> list[TaskInputRow]:
        """Start a task for inputs with these values. Raise as `check`, before any input begins."""
        filled = await self.check(row, rows)
        inputs = [
            TaskInputRow(number, values, f"{row.id}-{number:04}")
            for number, values in enumerate(rows, 1)
        ]
        await tasks.add(self._store, row, inputs)
        work = self._work(row.id, list(zip(inputs, filled, strict=True)), begin, at_once)
        task = asyncio.create_task(work, name=row.id)
        self._active[row.id] = row.owner, task
        task.add_done_callback(lambda _: self._active.pop(row.id, None))
        return inputs

    async def check(self, row: TaskRow, rows: Sequence[Mapping[str, str]]) -> Sequence[FilledTask]:
        """Return the inputs of a task with these values. Raise as `template` and `fill`, and
        Unavailable `too_many_tasks`."""
        template = await self.template(row.template)
        filled = [fill_input(template, number, values) for number, values in enumerate(rows, 1)]
        if sum(owner == row.owner for owner, _ in self._active.values()) >= _PER_OWNER:
            raise Unavailable(
                f"{_PER_OWNER} tasks are not complete, which is the limit",
                code="too_many_tasks",
                hint="wait until one of them ends, or abort one",
                details={"limit": _PER_OWNER},
            )
        return filled

    def new_row(self, owner: str, template: str, user_id: str, agent_id: str) -> TaskRow:
        task_id = f"task-{secrets.token_hex(8)}"
        return TaskRow(task_id, owner, template, user_id, agent_id, self._clock.now())

    async def list(self, owner: str, limit: int) -> Sequence[TaskRow]:
        """Return the tasks of an owner, the newest first."""
        return await tasks.list_for_owner(self._store, owner, limit)

    async def get(self, owner: str, task_id: str) -> tuple[TaskRow, Sequence[TaskInputRow]]:
        """Return a task with its inputs. Raise NotFound `task_not_found`."""
        if (task := await tasks.get(self._store, owner, task_id)) is None:
            raise no_task(task_id)
        return task

    async def abort(self, task_id: str) -> bool:
        """End a task: abort its runs. Return False if it has already ended."""
        _, task = self._active.get(task_id, ("", None))
        if task is None:
            return False
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return True

    async def close(self) -> None:
        """End all tasks; inputs that are not complete are `interrupted`."""
        for task_id in list(self._active):
            await self.abort(task_id)

    async def _work(
        self,
        task_id: str,
        inputs: Sequence[tuple[TaskInputRow, FilledTask]],
        begin: Begin,
        at_once: int,
    ) -> None:
        turns = asyncio.Semaphore(at_once)

        async def work(row: TaskInputRow, filled: FilledTask) -> None:
            async with turns:
                await self._do_input(task_id, row, filled, begin)

        try:
            async with asyncio.TaskGroup() as group:
                for row, filled in inputs:
                    group.create_task(work(row, filled))
        except Exception:  # noqa: BLE001  # the border of a background task
            _log.exception("%s failed", task_id)
        finally:
            await tasks.end(self._store, task_id, self._clock.now())

    async def _do_input(
        self, task_id: str, row: TaskInputRow, filled: FilledTask, begin: Begin
    ) -> None:
        """Work on one input. A failure is its result."""
        try:
            run = await self._begun(row.conversation_id, filled, begin)
        except SbxError as error:
            ended = replace(row, state="error", error=without_host_paths(error))
            await tasks.put_input(self._store, task_id, ended)
            return
        row = replace(row, state="running", run_id=run.run_id)
        try:
            await tasks.put_input(self._store, task_id, row)
            await run.ended()
        except BaseException:
            await run.abort()
            raise
        if (end := run.end) is not None:
            row = replace(
                row,
                state=end.reason,
                answer=end.content[:_ANSWER_MAX],
                error=end.error,
                tokens=sum(end.usage.values()),
            )
        await tasks.put_input(self._store, task_id, row)

    async def _begun(self, name: str, filled: FilledTask, begin: Begin) -> ChatRun:
        """Start a run. Wait while the owner has as many agents at work as allowed."""
        while True:
            try:
                return await begin(name, filled)
            except Unavailable as error:
                if error.code != "too_many_chats":
                    raise
            await asyncio.sleep(_RETRY_S)


def no_task(task_id: str) -> NotFound:
    return NotFound(f"the task {task_id[:80]!r} does not exist", code="task_not_found")
