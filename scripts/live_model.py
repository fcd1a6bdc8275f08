"""The acceptance tasks of an agent, for a real model. Files are checked, not words."""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import sbx
from sbx.agent.agent import Agent, Budget, OnStep
from sbx.agent.models import Model
from sbx.agent.models.factory import make_model
from sbx.agent.settings import read_agent_settings
from sbx.errors import BadRequest, SbxError
from sbx.protocol.agent import AgentRunEnd

_POLICY = "data-science"
_SECONDS = 300.0  # for each task
_TOKENS = 200_000
_TOWNS = "city,people\nKumquat,3\nLoquat,39\n"
_BROKEN = """\
def median(numbers):
    ordered = sorted(numbers)
    return ordered[len(ordered) / 2]


print(median([9, 1, 5]))
"""


# Does a task with a model. Returns the ends of its runs, or raises AssertionError.
Do = Callable[[sbx.Runtime, Model, OnStep], Awaitable[list[AgentRunEnd]]]


@dataclass(frozen=True, slots=True)
class Task:
    """`files` are those of the workspace at the start. `check` raises AssertionError with the
    reason if the agent did not do the task."""

    name: str
    text: str
    check: Callable[[sbx.AsyncSandbox], Awaitable[None]]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    task: str
    failure: str | None
    steps: int
    tokens: int
    seconds: float


async def _sum(box: sbx.AsyncSandbox) -> None:
    text = (await box.files.read("result.txt")).strip()
    assert text == "42", f"result.txt has {text[:80]!r}"


async def _repaired(box: sbx.AsyncSandbox) -> None:
    run = await box.shell("python median.py")
    assert run.stdout.strip() == "5", f"median.py prints {run.stdout[:80]!r} {run.stderr[-200:]!r}"


async def _drawn(box: sbx.AsyncSandbox) -> None:
    content = await box.files.read_bytes("towns.png")
    assert content.startswith(b"\x89PNG"), "towns.png is not a PNG"


async def _found(box: sbx.AsyncSandbox) -> None:
    text = (await box.files.read("found.txt")).strip()
    assert text.endswith("notes/7.txt"), f"found.txt has {text[:80]!r}"


async def _edited(box: sbx.AsyncSandbox) -> None:
    text = await box.files.read("config.toml")
    assert text == "# keep me\nport = 9000\nhost = 'a'\n", f"config.toml is {text[:200]!r}"


TASKS = (
    Task(
        "sum",
        "How many people live in the towns of towns.csv? Write only the number to result.txt.",
        _sum,
        {"towns.csv": _TOWNS},
    ),
    Task(
        "repair",
        "median.py fails. Find the bug, repair the file, and run it to see that it works.",
        _repaired,
        {"median.py": _BROKEN},
    ),
    Task(
        "figure",
        "Draw a bar chart of the people in each city of towns.csv, and save it as towns.png.",
        _drawn,
        {"towns.csv": _TOWNS},
    ),
    Task(
        "search",
        "One file below notes/ contains the word TODO. Write its path to found.txt.",
        _found,
        {f"notes/{n}.txt": "TODO: water\n" if n == 7 else f"note {n}\n" for n in range(1, 12)},
    ),
    Task(
        "edit",
        "In config.toml, change the port to 9000. Change nothing else in the file.",
        _edited,
        {"config.toml": "# keep me\nport = 8000\nhost = 'a'\n"},
    ),
)


async def do(task: Task, runtime: sbx.Runtime, model: Model, on_step: OnStep) -> list[AgentRunEnd]:
    """Do one task in a new sandbox. Raise AssertionError if its result is wrong."""
    async with await runtime.create(_POLICY) as box:
        for name, content in task.files.items():
            await box.files.write(name, content)
        agent = Agent(box, model, budget=Budget(tokens=_TOKENS, seconds=_SECONDS))
        end = await agent.run(task.text, max_steps=20, on_step=on_step)
        assert end.reason == "done", f"the run ended with {end.reason}: {end.error}"
        await task.check(box)
    return [end]


def all_tasks() -> dict[str, Do]:
    """Return the tasks of this file, and the longer ones of examples/agent_tasks.py."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    longer: dict[str, Do] = import_module("agent_tasks").TASKS
    return {task.name: partial(do, task) for task in TASKS} | longer


async def outcome_of(name: str, task: Do, runtime: sbx.Runtime, model: Model) -> Outcome:
    began, steps, tokens, failure = time.monotonic(), 0, 0, None

    def count(_: object) -> None:
        nonlocal steps
        steps += 1

    try:
        ends = await task(runtime, model, count)
        tokens = sum(sum(end.usage.values()) for end in ends)
    except* (AssertionError, SbxError) as errors:
        failure = (str(_first(errors)).splitlines() or ["failed"])[0]
    return Outcome(name, failure, steps, tokens, time.monotonic() - began)


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group, which a task with several runs raises."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def do_all(tasks: Mapping[str, Do], console: Console) -> list[Outcome]:
    model = make_model(read_agent_settings())
    outcomes = []
    try:
        async with sbx.Runtime() as runtime:
            for name, task in tasks.items():
                console.print(f"{name} …", end=" ")
                outcomes.append(outcome := await outcome_of(name, task, runtime, model))
                console.print("ok" if outcome.failure is None else "failed")
    finally:
        await model.close()
    return outcomes


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table("task", "result", "steps", "tokens", "seconds", box=None, pad_edge=False)
    for each in outcomes:
        row: tuple[Any, ...] = (each.task, each.failure or "ok", each.steps, each.tokens)
        table.add_row(*map(str, row), f"{each.seconds:.1f}")
    console.print(table)


def main() -> int:
    tasks = all_tasks()
    names = list(tasks)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="*", metavar="TASK", help=f"{', '.join(names)}; default: all")
    chosen = parser.parse_args().task or names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown task: {', '.join(sorted(unknown))}")
    console = Console(highlight=False, soft_wrap=True)
    try:
        outcomes = asyncio.run(do_all({name: tasks[name] for name in chosen}, console))
    except BadRequest as error:
        if error.code != "missing_setting":
            raise
        console.print(f"SKIPPED: {error.message}")
        return 0
    show(outcomes, console)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
