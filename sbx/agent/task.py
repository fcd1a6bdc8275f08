"""Templates of tasks: a prompt or steps, with parameters, files, and checks. Only `read_task` does
I/O."""

import posixpath
import shlex
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from string import Template
from typing import Annotated, Literal, Self

from msgspec import Struct
from pydantic import Field, StringConstraints, field_validator, model_validator

from sbx.agent.operator_files import OperatorFiles, OperatorTable
from sbx.agent.profile import Name, Text
from sbx.errors import BadRequest, Conflict, SbxError
from sbx.policy.units import parse_duration

INPUTS_MAX = 1000  # of one fan-out
_VALUE_MAX = 100_000  # characters
_ParameterName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_LongText = Annotated[str, StringConstraints(min_length=1, max_length=_VALUE_MAX)]
_Check = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
_Steps = Annotated[int, Field(ge=1, le=1000)]
_CACHED_S = 7 * 86_400.0  # `cache = true`


class _Text(Template):
    """`${steps.NAME.answer}` is a name, too."""

    braceidpattern = r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*"


class TaskParameter(OperatorTable):
    """`kind` `file`: the path of a file, which is uploaded; its name takes the place of the
    parameter. Without a `default` the parameter is required."""

    description: Text = ""
    kind: Literal["text", "file"] = "text"
    default: str | None = None
    choices: Annotated[tuple[str, ...], Field(min_length=1, max_length=200)] | None = None


class TaskStep(OperatorTable):
    """One step of a task, with its own agent and its own workspace. It begins once all steps in
    `needs` are done, gets their `files` at the same paths, and may name their answers as
    `${steps.NAME.answer}`. `files`: paths below /workspace that it writes."""

    name: _ParameterName
    prompt: _LongText
    needs: Annotated[tuple[_ParameterName, ...], Field(max_length=100)] = ()
    files: Annotated[tuple[_LongText, ...], Field(max_length=100)] = ()
    check: _Check | None = None
    max_steps: _Steps | None = None

    @field_validator("files")
    @classmethod
    def _are_in_the_workspace(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for path in files:
            first = path.partition("/")[0]
            if posixpath.normpath(path) != path or first in ("", ".", "..", "uploads"):
                raise ValueError(f"{path[:200]!r} is not the path of a file below /workspace")
        return files


class TaskTemplate(OperatorTable):
    """`${name}` in `prompt` and in `check` stands for a parameter; in `check` it is quoted for the
    shell. `agent`: the agent whose profile counts. `files` are uploaded, too. `check`: a command
    whose exit code decides whether the task is done. `step`: several steps, each with a prompt and
    a check. `cache`: for how long a result is used again for the same input."""

    description: Text = ""
    agent: Name | None = None
    prompt: _LongText | None = None
    parameters: Annotated[Mapping[_ParameterName, TaskParameter], Field(max_length=100)] = Field(
        default_factory=dict
    )
    files: Annotated[tuple[Path, ...], Field(max_length=100)] = ()
    check: _Check | None = None
    max_steps: _Steps | None = None
    step: Annotated[tuple[TaskStep, ...], Field(max_length=100)] = ()
    cache: bool | str = False

    @field_validator("cache")
    @classmethod
    def _is_a_duration(cls, cache: bool | str) -> bool | str:
        if isinstance(cache, str):
            try:
                parse_duration(cache)
            except SbxError as error:
                raise ValueError(error.message) from None
        return cache

    @model_validator(mode="after")
    def _names_its_parameters(self) -> Self:
        if (self.prompt is None) != bool(self.step):
            raise ValueError("a task has a prompt, or the tables [[step]], and not both")
        if self.step and self.check is not None:
            raise ValueError("check belongs to a step of this task")
        _check_texts("", self.prompt or "", self.check, {*self.parameters})
        for name, parameter in self.parameters.items():
            if parameter.choices is not None and parameter.default not in (
                None,
                *parameter.choices,
            ):
                raise ValueError(f"the default of {name} is not one of its choices")
        return self

    @model_validator(mode="after")
    def _has_an_order(self) -> Self:
        steps = {step.name: step for step in self.step}
        if len(steps) < len(self.step):
            raise ValueError("two steps have the same name")
        for name, step in steps.items():
            if missing := set(step.needs) - steps.keys():
                raise ValueError(f"step {name} needs {min(missing)}, which does not exist")
            received = list(chain.from_iterable(steps[each].files for each in step.needs))
            if twice := [path for path in received if received.count(path) > 1]:
                raise ValueError(f"step {name} gets {twice[0]} from two steps")
            answers = {_answer(each) for each in step.needs}
            _check_texts(
                f"step {name}: ", step.prompt, step.check, self.parameters.keys() | answers
            )
        try:
            TopologicalSorter({name: step.needs for name, step in steps.items()}).prepare()
        except CycleError as error:
            raise ValueError(f"steps need each other: {' → '.join(error.args[1])}") from None
        return self

    @property
    def cached_s(self) -> float:
        """Return for how many seconds a result counts; 0 without a cache."""
        if isinstance(self.cache, str):
            return parse_duration(self.cache)
        return _CACHED_S if self.cache else 0.0


def _answer(step: str) -> str:
    return f"steps.{step}.answer"


def _check_texts(place: str, prompt: str, check: str | None, names: set[str]) -> None:
    for field, text in (("prompt", prompt), ("check", check or "")):
        template = _Text(text)
        if not template.is_valid():
            raise ValueError(f"{place}{field} has a $ that is neither $$ nor ${{name}}")
        if missing := set(template.get_identifiers()) - names:
            within = "parameters or needs" if place else "parameters"
            raise ValueError(f"{place}{field} names {min(missing)}, which is not in {within}")


class FilledStep(Struct, frozen=True):
    """A step with the values of the parameters. `texts`: its prompt and its check, in which the
    answers of other steps are missing. The only step of a task without steps has no name."""

    name: str
    texts: tuple[str, str | None]
    values: Mapping[str, str]
    uploads: tuple[Path, ...]
    needs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    max_steps: int | None = None

    def task(self, answers: Mapping[str, str]) -> "FilledTask":
        """Return the task, with the answers of the steps that it needs."""
        values = {**self.values, **{_answer(name): answers[name] for name in self.needs}}
        prompt, check = self.texts
        quoted = {name: shlex.quote(value) for name, value in values.items()}
        return FilledTask(
            _Text(prompt).substitute(values),
            None if check is None else _Text(check).substitute(quoted),
            self.uploads,
        )


class FilledTask(Struct, frozen=True):
    """A task to be done. `uploads`: files of the host, with different names."""

    prompt: str
    check: str | None
    uploads: tuple[Path, ...]


def fill(template: TaskTemplate, values: Mapping[str, str]) -> FilledTask:
    """Return the task with these values of its parameters. Raise BadRequest `invalid_parameters`,
    with the name of the parameter in the details."""
    (step,) = fill_steps(template, values)
    return step.task({})


def fill_steps(template: TaskTemplate, values: Mapping[str, str]) -> tuple[FilledStep, ...]:
    """Return the steps with these values. Raise as `fill`."""
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
    limit = template.max_steps
    if template.prompt is not None:
        texts = template.prompt, template.check
        return (FilledStep("", texts, filled, tuple(uploads), max_steps=limit),)
    return tuple(
        FilledStep(
            step.name,
            (step.prompt, step.check),
            filled,
            tuple(uploads),
            step.needs,
            step.files,
            step.max_steps or limit,
        )
        for step in template.step
    )


def fill_input(
    template: TaskTemplate, number: int, values: Mapping[str, str]
) -> tuple[FilledStep, ...]:
    """Fill the template for one of several inputs. Raise as `fill`, with the number of the
    input."""
    try:
        return fill_steps(template, values)
    except BadRequest as error:
        raise BadRequest(
            f"input {number}: {error.message}",
            code=error.code,
            hint=error.hint,
            details={**(error.details or {}), "input": number},
        ) from None


def no_output(step: str, path: str) -> Conflict:
    return Conflict(
        f"the step {step} ended without its file {path[:200]}",
        code="step_output_missing",
        hint="name the file in its prompt, or test for it in its check",
        details={"step": step, "path": path[:200]},
    )


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
