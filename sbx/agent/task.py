"""Templates of tasks: a prompt with parameters, files, and a check. Only `read_task` does I/O."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated, Literal, Self

from msgspec import Struct
from pydantic import Field, StringConstraints, model_validator

from sbx.agent.operator_files import OperatorFiles, OperatorTable
from sbx.agent.profile import Name, Text
from sbx.errors import BadRequest

INPUTS_MAX = 1000  # of one fan-out
_VALUE_MAX = 100_000  # characters
_ParameterName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_LongText = Annotated[str, StringConstraints(min_length=1, max_length=_VALUE_MAX)]


class TaskParameter(OperatorTable):
    """`kind` `file`: the path of a file, which is uploaded; its name takes the place of the
    parameter. Without a `default` the parameter is required."""

    description: Text = ""
    kind: Literal["text", "file"] = "text"
    default: str | None = None
    choices: Annotated[tuple[str, ...], Field(min_length=1, max_length=200)] | None = None


class TaskTemplate(OperatorTable):
    """`${name}` in `prompt` and in `check` stands for a parameter; in `check` it is quoted for the
    shell. `agent`: the agent whose profile counts. `files` are uploaded, too. `check`: a command
    whose exit code decides whether the task is done."""

    description: Text = ""
    agent: Name | None = None
    prompt: _LongText
    parameters: Annotated[Mapping[_ParameterName, TaskParameter], Field(max_length=100)] = Field(
        default_factory=dict
    )
    files: Annotated[tuple[Path, ...], Field(max_length=100)] = ()
    check: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None
    max_steps: Annotated[int, Field(ge=1, le=1000)] | None = None

    @model_validator(mode="after")
    def _names_its_parameters(self) -> Self:
        for field, text in (("prompt", self.prompt), ("check", self.check or "")):
            template = Template(text)
            if not template.is_valid():
                raise ValueError(f"{field} has a $ that is neither $$ nor ${{name}}")
            if missing := set(template.get_identifiers()) - self.parameters.keys():
                raise ValueError(f"{field} names {min(missing)}, which is not in parameters")
        for name, parameter in self.parameters.items():
            if parameter.choices is not None and parameter.default not in (
                None,
                *parameter.choices,
            ):
                raise ValueError(f"the default of {name} is not one of its choices")
        return self


class FilledTask(Struct, frozen=True):
    """A task to be done. `uploads`: files of the host, with different names."""

    prompt: str
    check: str | None
    uploads: tuple[Path, ...]


def fill(template: TaskTemplate, values: Mapping[str, str]) -> FilledTask:
    """Return the task with these values of its parameters. Raise BadRequest `invalid_parameters`,
    with the name of the parameter in the details."""
    for name in values:
        if name not in template.parameters:
            existing = ", ".join(template.parameters) or "none"
            raise _wrong(name, "does not exist", hint=f"there are: {existing}")
    filled: dict[str, str] = {}
    uploads = list(template.files)
    for name, parameter in template.parameters.items():
        value = values.get(name, parameter.default)
        if value is None:
            raise _wrong(name, "is missing", hint=parameter.description or None)
        if parameter.choices is not None and value not in parameter.choices:
            raise _wrong(name, f"must be one of {', '.join(parameter.choices)}")
        if len(value) > _VALUE_MAX:
            raise _wrong(name, f"is longer than {_VALUE_MAX} characters")
        if parameter.kind == "file":
            uploads.append(Path(value))
            value = Path(value).name
        filled[name] = value
    names = [path.name for path in uploads]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadRequest(f"two files have the name {twice[0]}", code="invalid_parameters")
    quoted = {name: shlex.quote(value) for name, value in filled.items()}
    check = None if template.check is None else Template(template.check).substitute(quoted)
    return FilledTask(Template(template.prompt).substitute(filled), check, tuple(uploads))


def fill_input(template: TaskTemplate, number: int, values: Mapping[str, str]) -> FilledTask:
    """Fill the template for one of several inputs. Raise as `fill`, with the number of the
    input."""
    try:
        return fill(template, values)
    except BadRequest as error:
        raise BadRequest(
            f"input {number}: {error.message}",
            code=error.code,
            hint=error.hint,
            details={**(error.details or {}), "input": number},
        ) from None


def _wrong(name: str, problem: str, hint: str | None = None) -> BadRequest:
    return BadRequest(
        f"the parameter {name[:64]} {problem}",
        code="invalid_parameters",
        hint=hint,
        details={"field": name[:64]},
    )


_FILES = OperatorFiles(TaskTemplate, "task", "invalid_task", "docs/tasks.md")
parse_task = _FILES.parse
task_files = _FILES.list


def read_task(path: Path) -> TaskTemplate:
    """Return the template in a file. Its `files` lie in its directory, unless their paths are
    absolute.
    Raise BadRequest `invalid_task`, also for a file that cannot be read."""
    template = _FILES.read(path)
    files = tuple(path.parent / file.expanduser() for file in template.files)
    return template.model_copy(update={"files": files})


def read_tasks(directory: Path) -> dict[str, TaskTemplate | BadRequest]:
    """Return the templates in a directory by name, or the error of a file."""
    templates: dict[str, TaskTemplate | BadRequest] = {}
    for name, path in task_files(directory).items():
        try:
            templates[name] = read_task(path)
        except BadRequest as error:
            templates[name] = error
    return templates
