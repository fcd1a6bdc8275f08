"""Tasks from templates: an agent works on each input, in its own conversation.

    templates (files of the operator) ─► fill ─► one conversation for each input, few at a time

A step of an input has its own conversation, too. The states are in the store. Inputs that a service
has not completed at its end are `interrupted`, and `resume` begins them again.

The cache has no copies: a cached result is the row of an earlier input, with its conversation. It
is gone with that conversation.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from sbx.agent.chats import ChatRun
from sbx.agent.task import FilledStep, TaskTemplate, fill_input, no_output, read_tasks
from sbx.agent.workflow import run_steps
from sbx.aio import Clock
from sbx.errors import BadRequest, Conflict, NotFound, SbxError, Unavailable
from sbx.protocol.events import encode
from sbx.service.task_place import TaskPlace
from sbx.store import Store, tasks
from sbx.store.tasks import TaskInputRow, TaskRow
from sbx.telemetry.host_paths import without_host_paths

__all__ = ["TaskInputRow", "TaskRow", "Tasks", "no_task"]

_PER_OWNER = 20  # that are not complete
_RETRY_S = 1.0
_ANSWER_MAX = 8192  # characters; the conversation has the whole
_log = logging.getLogger(__name__)


class Tasks:
    """`directory`: that of the templates, which need not exist."""

    def __init__(self, store: Store, clock: Clock, directory: Path) -> None:
        self._store = store
        self._clock = clock
        self._directory = directory
        self._active: dict[str, tuple[str, asyncio.Task[None]]] = {}  # with the owner
        self._resuming = asyncio.Lock()

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
        self, row: TaskRow, rows: Sequence[Mapping[str, str]], place: TaskPlace, at_once: int
    ) -> list[TaskInputRow]:
        """Start a task for inputs with these values. Raise as `check`, before any input begins."""
        filled = await self.check(row, rows)
        inputs = [
            TaskInputRow(number, values, _conversation(row, number, step), step=step.name)
            for number, (values, steps) in enumerate(zip(rows, filled, strict=True), 1)
            for step in steps
        ]
        await tasks.add(self._store, row, inputs)
        template = await self.template(row.template)
        self._begin(row, dict(enumerate(filled, 1)), inputs, template, place, at_once)
        return inputs

    async def check(
        self, row: TaskRow, rows: Sequence[Mapping[str, str]]
    ) -> Sequence[tuple[FilledStep, ...]]:
        """Return the inputs of a task with these values. Raise as `template` and `fill`, and
        Unavailable `too_many_tasks`."""
        template = await self.template(row.template)
        filled = [fill_input(template, number, values) for number, values in enumerate(rows, 1)]
        self._check_room(row)
        return filled

    async def check_resume(
        self, row: TaskRow, inputs: Sequence[TaskInputRow]
    ) -> Mapping[int, tuple[FilledStep, ...]]:
        """Return the inputs of an ended task that are not done, by number. Raise as `check`, and
        Conflict `task_in_progress`, `task_erased`, `template_changed` and `nothing_to_resume`."""
        if row.id in self._active:
            raise Conflict("the task is not complete", code="task_in_progress")
        open_inputs = [each for each in inputs if each.state != "done"]
        if not open_inputs:
            raise Conflict("all inputs of the task are done", code="nothing_to_resume")
        if any(each.erased for each in open_inputs):
            message = "the conversation of an input was deleted, and its parameters with it"
            raise Conflict(message, code="task_erased", hint="start the task again")
        template = await self.template(row.template)
        filled = {
            each.number: fill_input(template, each.number, each.parameters) for each in open_inputs
        }
        for number, steps in filled.items():
            if {step.name for step in steps} != {
                each.step for each in inputs if each.number == number
            }:
                message = f"the template {row.template} has other steps than this task"
                raise Conflict(message, code="template_changed", hint="start the task again")
        self._check_room(row)
        return filled

    async def resume(self, row: TaskRow, place: TaskPlace, at_once: int) -> None:
        """Begin the inputs and steps of an ended task that are not done, each in a new
        conversation. Raise as `check_resume`."""
        async with self._resuming:
            _, inputs = await self.get(row.owner, row.id)
            filled = await self.check_resume(row, inputs)
            waiting = [
                each
                if each.state == "done"
                else TaskInputRow(
                    each.number,
                    each.parameters,
                    f"{each.conversation_id[:180]}-{secrets.token_hex(2)}",
                    step=each.step,
                )
                for each in inputs
            ]
            template = await self.template(row.template)
            begun = [each for each in waiting if each.state != "done"]
            await tasks.resume(self._store, row.id, begun)
            self._begin(row, filled, waiting, template, place, at_once)

    def _check_room(self, row: TaskRow) -> None:
        if sum(owner == row.owner for owner, _ in self._active.values()) >= _PER_OWNER:
            raise Unavailable(
                f"{_PER_OWNER} tasks are not complete, which is the limit",
                code="too_many_tasks",
                hint="wait until one of them ends, or abort one",
                details={"limit": _PER_OWNER},
            )

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

    def _begin(
        self,
        row: TaskRow,
        filled: Mapping[int, tuple[FilledStep, ...]],
        inputs: Sequence[TaskInputRow],
        template: TaskTemplate,
        place: TaskPlace,
        at_once: int,
    ) -> None:
        turns = asyncio.Semaphore(at_once)
        works = [
            _InputWork(
                row, {each.step: each for each in inputs if each.number == number}, template, place
            )
            for number in filled
        ]

        async def work(each: _InputWork, steps: tuple[FilledStep, ...]) -> None:
            done = [name for name, state in each.rows.items() if state.state == "done"]

            async def do(step: FilledStep) -> bool:
                async with turns:
                    await self._do_step(each, step)
                return each.rows[step.name].state == "done"

            await run_steps(steps, do, done)
            for state in each.rows.values():
                if state.state == "waiting":
                    skipped = replace(state, state="skipped")
                    await tasks.put_input(self._store, row.id, skipped)

        async def all_inputs() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for each, steps in zip(works, filled.values(), strict=True):
                        group.create_task(work(each, steps))
            except Exception:  # noqa: BLE001  # the border of a background task
                _log.exception("%s failed", row.id)
            finally:
                await tasks.end(self._store, row.id, self._clock.now())

        task = asyncio.create_task(all_inputs(), name=row.id)
        self._active[row.id] = row.owner, task
        task.add_done_callback(lambda _: self._active.pop(row.id, None))

    async def _do_step(self, work: "_InputWork", step: FilledStep) -> None:
        """Do a step, or the only one of an input. A failure is its result."""
        row, place = work.rows[step.name], work.place
        try:
            row = replace(row, cache_key=await asyncio.to_thread(work.cache_key, step))
            if (earlier := await self._cached(work, row, step)) is not None:
                await self._put(work, earlier)
                return
            await place.upload(row.conversation_id, work.template.files)
            answers = await self._answers(work, step)
            for need in step.needs:
                source = work.rows[need].conversation_id
                paths = next(each.files for each in work.template.step if each.name == need)
                await place.copy(source, paths, row.conversation_id)
            run = await self._begun(row.conversation_id, step, answers, place)
        except SbxError as error:
            ended = replace(row, state="error", error=without_host_paths(error))
            await self._put(work, ended)
            return
        row = replace(row, state="running", run_id=run.run_id)
        try:
            await self._put(work, row)
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
        if row.state == "done" and step.files:
            row = await _with_outputs(row, step, place)
        await self._put(work, row)

    async def _put(self, work: "_InputWork", row: TaskInputRow) -> None:
        work.rows[row.step] = row
        await tasks.put_input(self._store, work.task.id, row)

    async def _answers(self, work: "_InputWork", step: FilledStep) -> Mapping[str, str]:
        """Return the answers of the steps that a step needs. Raise Conflict `task_erased`."""
        if not step.needs:
            return {}
        _, inputs = await self.get(work.task.owner, work.task.id)
        number = work.rows[step.name].number
        rows = {each.step: each for each in inputs if each.number == number}
        answers = {name: rows[name].answer for name in step.needs}
        if any(answer is None or rows[name].erased for name, answer in answers.items()):
            message = "the conversation of a needed step was deleted"
            raise Conflict(message, code="task_erased", hint="start the task again")
        return {name: answer or "" for name, answer in answers.items()}

    async def _cached(
        self, work: "_InputWork", row: TaskInputRow, step: FilledStep
    ) -> TaskInputRow | None:
        """Return the row with an earlier result of the same input, if there is one with all its
        files."""
        if row.cache_key is None:
            return None
        since = self._clock.now() - work.template.cached_s
        earlier = await tasks.cached(self._store, work.task, row.cache_key, since)
        if earlier is None or await work.place.missing(earlier.conversation_id, step.files):
            return None
        return replace(
            row,
            state="done",
            conversation_id=earlier.conversation_id,
            run_id=earlier.run_id,
            answer=earlier.answer,
            cached=True,
        )

    async def _begun(
        self, name: str, step: FilledStep, answers: Mapping[str, str], place: TaskPlace
    ) -> ChatRun:
        """Start a run. Wait while the owner has as many agents at work as allowed."""
        while True:
            try:
                return await place.begin(name, step.task(answers), step.max_steps)
            except Unavailable as error:
                if error.code != "too_many_chats":
                    raise
            await asyncio.sleep(_RETRY_S)


class _InputWork(Struct):
    """One input of a task at work, with the row of each of its steps."""

    task: TaskRow
    rows: dict[str, TaskInputRow]
    template: TaskTemplate
    place: TaskPlace

    def cache_key(self, step: FilledStep) -> str | None:
        """Return the hash of everything that a result depends on. The results of the needed steps
        are named by their conversations, which have their files."""
        # A parameter of the kind `file` names an upload, whose content this service does not know.
        kinds = {parameter.kind for parameter in self.template.parameters.values()}
        if self.place.facts is None or not self.template.cached_s or "file" in kinds:
            return None
        needs = [[name, self.rows[name].conversation_id] for name in step.needs]
        try:
            uploads = [
                [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
                for path in self.template.files
            ]
        except OSError:  # the upload of the file reports it
            return None
        values = sorted(step.values.items())
        facts = [step.texts, values, step.files, step.max_steps, needs, uploads]
        return hashlib.sha256(encode({"place": self.place.facts, "step": facts})).hexdigest()


async def _with_outputs(row: TaskInputRow, step: FilledStep, place: TaskPlace) -> TaskInputRow:
    """Return the row, with an error if a file of the step is missing."""
    try:
        path = await place.missing(row.conversation_id, step.files)
        error: SbxError | None = None if path is None else no_output(step.name, path)
    except SbxError as refusal:
        error = refusal
    return row if error is None else replace(row, state="error", error=without_host_paths(error))


def _conversation(row: TaskRow, number: int, step: FilledStep) -> str:
    return "-".join(filter(None, (row.id, f"{number:04}", step.name)))


def no_task(task_id: str) -> NotFound:
    return NotFound(f"the task {task_id[:80]!r} does not exist", code="task_not_found")
