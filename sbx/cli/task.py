"""`sbx task`: tasks from templates, for one input or for many at once."""

import csv
import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import agent_options, connect, narrowing, output
from sbx.cli.terminal import one_line
from sbx.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from sbx.agent.task import FilledStep, TaskTemplate

app = typer.Typer(
    help="Tasks from templates: a prompt with parameters, files and a check, for one input or for "
    "many at once.",
    rich_markup_mode=None,
)
Values = dict[str, str]
SHOWN = 60  # characters of an input


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
            "001, 002, …, and of steps in directories with their names.",
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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Do only the inputs and steps that are not done yet: their results are in "
            "DIR.results.",
        ),
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Use no earlier result, and keep none.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result of each input as a line of JSON."),
    ] = False,
) -> int:
    """Do a task. Each input, and each step of an input, has its own sandbox, which is deleted at
    the end.

    One input prints its answer. Several show their progress, and one table of all results.

    \b
    exit codes:
      0    all inputs are done
      1    an input failed, or ended at a limit
      130  aborted
    """
    import asyncio  # a lazy import keeps `sbx --help` fast

    from sbx.cli.agent_task import agent_host
    from sbx.cli.task_work import Results, StepWork, TaskBounds, do_all

    if resume and out is None:
        raise BadRequest("--resume needs the --out of the first run")
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
    filled = _filled(template, rows)
    works = [
        StepWork(number, row, _label(template, row), step, _place(out, len(rows), number, step))
        for number, (row, steps) in enumerate(filled, 1)
        for step in steps
    ]
    sandbox = narrowing.sandbox_options(
        memory=memory, cpus=cpus, network_allow=network_allow, env=env
    )
    limits = chosen.limits
    bounds = TaskBounds(settings.max_steps, max_steps, limits.max_tokens, limits.max_seconds)
    chosen_model = agent_options.model_of(settings, replay, record, chosen.model.options)
    facts = (
        *(settings.model_provider, settings.base_url, chosen_model.name),
        *(chosen.model_dump(mode="json"), settings.sandbox_image, settings.sandbox_domain, sandbox),
        max_steps,
    )
    results = Results.of(
        out if len(works) > 1 else None,
        0.0 if no_cache else template.cached_s,
        facts,
        resume=resume,
    )
    agent_id = agent_options.agent_id_of(agent)
    host = agent_host(settings, chosen_model, chosen, agent_id, sandbox)
    return asyncio.run(do_all(works, host, bounds, results, at_once, as_json=as_json))


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


def _filled(
    template: "TaskTemplate", rows: Sequence[Values]
) -> "list[tuple[Values, tuple[FilledStep, ...]]]":
    """Return the tasks. Raise BadRequest for the first input that does not fit, before any starts;
    files must exist."""
    from sbx.agent.task import fill_input, fill_steps
    from sbx.cli.run import check_names

    tasks = []
    for number, row in enumerate(rows, 1):
        one_input = len(rows) == 1
        steps = fill_steps(template, row) if one_input else fill_input(template, number, row)
        check_names(steps[0].uploads)
        tasks.append((row, steps))
    return tasks


def _label(template: "TaskTemplate", row: Values) -> str:
    values = (
        Path(value).name if template.parameters[name].kind == "file" else value
        for name, value in row.items()
    )
    return one_line(", ".join(values))[:SHOWN]


def _place(out: Path | None, inputs: int, number: int, step: "FilledStep") -> Path | None:
    """Return the directory for the files of a step, created if it is missing."""
    from sbx.cli.save_files import directory_for

    if out is None:
        return None
    of_input = out if inputs == 1 else out / f"{number:03}"
    return directory_for(of_input / step.name)
