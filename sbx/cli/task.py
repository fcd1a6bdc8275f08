"""`sbx task`: tasks from templates, for one input or for many at once."""

import csv
import glob
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import agent_options, connect, exits, narrowing, output
from sbx.cli.terminal import one_line
from sbx.errors import BadRequest, NotFound, SbxError

if TYPE_CHECKING:
    from sbx.agent.task import FilledTask, TaskTemplate
    from sbx.cli.agent_task import AgentHost, AgentTask
    from sbx.protocol.agent import AgentEvent

app = typer.Typer(
    help="Tasks from templates: a prompt with parameters, files and a check, for one input or for "
    "many at once.",
    rich_markup_mode=None,
)
Values = dict[str, str]
_HEADS = ("input", "state", "steps", "tokens", "time", "answer")
_SHOWN = 60  # characters of an input, and of an answer


@app.command("run")
def run_task(
    name: Annotated[str, typer.Argument(help="A template: its name, or its file.", metavar="NAME")],
    param: Annotated[
        list[str] | None,
        typer.Option(help="The value of a parameter. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    each: Annotated[
        str | None,
        typer.Option(
            help="Do the task once for each file that matches: --each 'file=data/*.csv'.",
            metavar="NAME=PATTERN",
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Do the task once for each row of a CSV file, whose columns are parameters, or "
            "each line of a .jsonl file.",
            metavar="FILE",
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option(help="The number of inputs at a time.", min=1, max=64, metavar="N")
    ] = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Save the files that the agent wrote there; of several inputs, in directories "
            "001, 002, …",
            metavar="DIR",
        ),
    ] = None,
    profile: agent_options.Profile = None,
    policy: agent_options.Policy = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    model: agent_options.ModelName = None,
    max_steps: agent_options.MaxSteps = None,
    connect_to: agent_options.Connect = None,
    key: agent_options.Key = None,
    env_file: agent_options.EnvFile = None,
    replay: agent_options.Replay = None,
    record: agent_options.Record = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result of each input as a line of JSON."),
    ] = False,
) -> int:
    """Do a task. Each input has its own sandbox, which is deleted at the end.

    One input prints its answer. Several show their progress, and one table of all results.

    \b
    exit codes:
      0    all inputs are done
      1    an input failed, or ended at a limit
      130  aborted
    """
    import asyncio  # a lazy import keeps `sbx --help` fast

    from sbx.cli.agent_task import AgentTask, agent_host
    from sbx.cli.save_files import directory_for

    template = _template(name)
    rows = _rows(_pairs(param or ()), each, inputs)
    agent = profile or template.agent
    chosen = agent_options.profile_of(agent)
    settings = agent_options.settings(
        model=model,
        max_steps=max_steps or template.max_steps,
        policy=policy,
        connect=connect_to,
        key=key,
        env_file=env_file,
        profile=chosen,
    )
    tasks = []
    for number, (row, filled) in enumerate(_filled(template, rows), 1):
        directory = None
        if out is not None:
            directory = directory_for(out if len(rows) == 1 else out / f"{number:03}")
        task = AgentTask(
            text=filled.prompt,
            files=filled.uploads,
            out=directory,
            max_steps=settings.max_steps,
            max_tokens=chosen.limits.max_tokens,
            max_seconds=chosen.limits.max_seconds,
            completion_check=filled.check,
        )
        label = ", ".join(
            Path(value).name if template.parameters[name].kind == "file" else value
            for name, value in row.items()
        )
        tasks.append(_Input(number, row, one_line(label)[:_SHOWN], task))
    host = agent_host(
        settings,
        agent_options.model_of(settings, replay, record, chosen.model.options),
        chosen,
        agent_options.agent_id_of(agent),
        narrowing.sandbox_options(memory=memory, cpus=cpus, network_allow=network_allow, env=env),
    )
    return asyncio.run(_all(tasks, host, at_once, as_json=as_json))


@app.command("list")
def list_tasks(as_json: connect.Json = False) -> None:
    """List the templates in the directory of this user."""
    from sbx.agent.task import read_tasks

    directory = _directory()
    entries = []
    for name, template in read_tasks(directory).items():
        entry: dict[str, Any] = {"name": name, "path": str(directory / f"{name}.toml")}
        if isinstance(template, BadRequest):
            entry |= {"task": None, "problem": template.message}
        else:
            entry |= {"task": template.model_dump(mode="json"), "problem": None}
        entries.append(entry)
    if as_json:
        output.document({"tasks": entries})
        return
    rows = [
        (
            entry["name"],
            ", ".join(entry["task"]["parameters"]) if entry["task"] else "",
            entry["task"]["description"] if entry["task"] else f"not usable: {entry['problem']}",
        )
        for entry in entries
    ]
    empty = f"no templates exist in {one_line(str(directory))}"
    output.print_table(("task", "parameters", "its purpose"), rows, empty=empty)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Templates of tasks.", metavar="FILE…")],
    as_json: connect.Json = False,
) -> int:
    """Check templates. List every problem with its field."""
    from sbx.agent.task import read_task

    return agent_options.check_files(files, read_task, as_json=as_json)


# -- inputs ---------------------------------------------------------------------------------------


def _directory() -> Path:
    from sbx.runtime.settings import Settings

    return Settings().tasks_dir


def _template(name: str) -> "TaskTemplate":
    from sbx.agent.task import read_task, task_files

    if "/" in name or name.endswith(".toml"):
        return read_task(Path(name).absolute())
    files = task_files(_directory())
    if name not in files:
        raise NotFound(
            f"the template {name[:80]!r} does not exist in {_directory()}",
            code="task_not_found",
            hint="sbx task list shows them",
        )
    return read_task(files[name])


def _pairs(texts: Sequence[str]) -> Values:
    values: Values = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise BadRequest(f"write --param NAME=VALUE, not {text[:80]!r}")
        values[name] = value
    return values


def _rows(values: Values, each: str | None, inputs: Path | None) -> list[Values]:
    """Return the values of each input. Raise BadRequest."""
    from sbx.agent.task import INPUTS_MAX

    if each is not None and inputs is not None:
        raise BadRequest("give --each or --inputs, and not both")
    rows: list[Values] = [{}]
    if each is not None:
        name, separator, pattern = each.partition("=")
        if not separator:
            raise BadRequest(f"write --each NAME=PATTERN, not {each[:80]!r}")
        rows = [{name: path} for path in sorted(glob.glob(pattern, recursive=True))]
        if not rows:
            raise BadRequest(f"no file matches {pattern[:200]}")
    if inputs is not None:
        rows = _read_inputs(inputs)
    if len(rows) > INPUTS_MAX:
        raise BadRequest(f"there are {len(rows)} inputs, and {INPUTS_MAX} is the limit")
    return [values | row for row in rows]


def _read_inputs(path: Path) -> list[Values]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None
    rows: list[Any] = []
    try:
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = list(csv.DictReader(text.splitlines(), strict=True))
    except (ValueError, csv.Error) as error:
        raise BadRequest(f"{path} is neither CSV nor lines of JSON: {error}") from None
    if not rows or not all(isinstance(row, dict) and _is_flat(row) for row in rows):
        raise BadRequest(f"{path} has no rows, or one that does not fit its columns")
    return [{name: str(value) for name, value in row.items()} for row in rows]


def _is_flat(row: Mapping[Any, Any]) -> bool:
    """Return whether a row has as many values as names, and each is one value."""
    return None not in row and not any(
        isinstance(value, dict | list | None) for value in row.values()
    )


def _filled(template: "TaskTemplate", rows: Sequence[Values]) -> "list[tuple[Values, FilledTask]]":
    """Return the tasks. Raise BadRequest for the first input that does not fit, before any starts;
    files must exist."""
    from sbx.agent.task import fill, fill_input
    from sbx.cli.run import check_names

    tasks = []
    for number, row in enumerate(rows, 1):
        filled = fill(template, row) if len(rows) == 1 else fill_input(template, number, row)
        check_names(filled.uploads)
        tasks.append((row, filled))
    return tasks


# -- the work -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Input:
    """One input. `state` is the reason of its end, once it has ended."""

    number: int
    values: Values
    label: str
    task: "AgentTask"
    state: str = ""
    step: int = 0
    tokens: int = 0
    answer: str = ""
    error: dict[str, Any] | None = None
    saved: list[str] = field(default_factory=list)
    seconds: float = 0.0

    async def follow(self, event: "AgentEvent") -> None:
        from sbx.protocol.agent import AgentRunEnd, StepEnd

        match event:
            case StepEnd():
                self.step = event.step
                self.tokens += sum(event.usage.values())
            case AgentRunEnd():
                self.state, self.answer, self.error = event.reason, event.content, event.error
                self.tokens = sum(event.usage.values())

    @property
    def row(self) -> tuple[str, ...]:
        answer = self.answer if self.error is None else str(self.error.get("message", ""))
        return (
            self.label,
            self.state,
            str(self.step),
            str(self.tokens),
            f"{self.seconds:.1f} s",
            one_line(answer)[:_SHOWN],
        )

    @property
    def document(self) -> dict[str, Any]:
        return {
            "input": self.number,
            "parameters": self.values,
            "reason": self.state,
            "answer": self.answer,
            "error": self.error,
            "steps": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "saved": self.saved,
        }


async def _all(tasks: list[_Input], host: Any, at_once: int, *, as_json: bool) -> int:
    """Do all tasks, show their progress and their results, and return the exit code."""
    import asyncio

    from sbx.cli.signals import CancelOnSignal

    turns = asyncio.Semaphore(at_once)
    with CancelOnSignal():
        async with host as opened:

            async def work(each: _Input) -> None:
                async with turns:
                    await _do(each, opened)
                if as_json:
                    await asyncio.to_thread(output.document, each.document)
                elif len(tasks) > 1:
                    ended = sum(task.seconds > 0 for task in tasks)
                    output.note(f"{ended} of {len(tasks)}: {each.label} {each.state}")

            try:
                async with asyncio.TaskGroup() as group:
                    for each in tasks:
                        group.create_task(work(each))
            except BaseExceptionGroup as errors:  # of the output; a failed task is a result
                raise errors.exceptions[0] from None
    task = tasks[0]
    if not as_json and len(tasks) == 1:
        output.text(task.answer)
        if task.error is not None:
            output.failure(str(task.error.get("message", "")), task.error.get("hint"))
        elif task.state != "done":
            output.failure(f"the task ended before it was done: {task.state}")
    elif not as_json:
        output.print_table(_HEADS, [task.row for task in tasks])
    for path in [path for task in tasks for path in task.saved] if not as_json else ():
        output.note(f"saved: {path}")
    is_done = all(task.state == "done" for task in tasks)
    return exits.Exit.OK if is_done else exits.Exit.FAILED


async def _do(each: _Input, host: "AgentHost") -> None:
    """Do one task. A failure is its result."""
    from sbx.cli.agent_task import perform

    started_at = time.monotonic()
    try:
        _, saved = await perform(each.task, host, each.follow)
        if saved is not None:
            each.saved = [str(path) for path in saved.paths]
    except SbxError as error:
        each.state = "error"
        each.error = {"code": error.code, "message": error.message, "hint": error.hint}
    finally:
        each.seconds = time.monotonic() - started_at
