"""Templates of tasks: their files, and the tasks that values make of them."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from sbx.agent.task import (
    FilledStep,
    FilledTask,
    TaskParameter,
    TaskStep,
    TaskTemplate,
    fill,
    fill_steps,
    parse_task,
    read_task,
    task_files,
)
from sbx.agent.workflow import run_steps
from sbx.errors import BadRequest

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = parse_task(
    """
prompt = "Describe ${file} in ${language}; it costs 5 $$."
check = "test -s ${file} && grep ${language} out.txt"
[parameters.file]
kind = "file"
[parameters.language]
default = "English"
choices = ["English", "German; rm -rf /"]
""",
    "template",
)


def test_values_become_a_task() -> None:
    assert fill(TEMPLATE, {"file": "/data/my table.csv"}) == FilledTask(
        "Describe my table.csv in English; it costs 5 $.",
        "test -s 'my table.csv' && grep English out.txt",
        (Path("/data/my table.csv"),),
    )
    task = fill(TEMPLATE, {"file": "a.csv", "language": "German; rm -rf /"})
    assert task.check == "test -s a.csv && grep 'German; rm -rf /' out.txt"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "the parameter file is missing"),
        ({"file": "a", "more": "b"}, "the parameter more does not exist"),
        ({"file": "a", "language": "French"}, "must be one of"),
        ({"file": "a", "language": "x" * 200_000}, "must be one of"),
    ],
)
def test_wrong_values_name_the_parameter(values: dict[str, str], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem) as raised:
        fill(TEMPLATE, values)
    assert raised.value.code == "invalid_parameters"


def test_two_files_of_one_name_are_refused() -> None:
    parameters = {"file": TaskParameter(kind="file")}
    template = TaskTemplate(prompt="x", files=(Path("/a/x.csv"),), parameters=parameters)
    with pytest.raises(BadRequest, match=r"two files have the name x\.csv"):
        fill(template, {"file": "/b/x.csv"})


def test_a_value_is_not_read_as_a_template() -> None:
    template = parse_task('prompt = "${a} ${b}"\n[parameters.a]\n[parameters.b]', "t")
    assert fill(template, {"a": "${b}", "b": "$a $$"}).prompt == "${b} $a $$"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "prompt"),
        ('prompt = "${file}"', "names file"),
        ('prompt = "$5"', "neither $$ nor"),
        ('prompt = "x"\ncheck = "${y}"', "check names y"),
        ('prompt = "x"\n[parameters.Big]', "parameters"),
        ('prompt = "x"\n[parameters.a]\ndefault = "1"\nchoices = ["2"]', "not one of its choices"),
        ('prompt = "x"\nmore = 1', "no such field"),
    ],
)
def test_a_wrong_template_names_the_problem(text: str, problem: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_task(text, "template")
    assert raised.value.code == "invalid_task"
    assert any(problem in each for each in (raised.value.details or {})["problems"])


def test_files_lie_beside_the_template(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('prompt = "x"\nfiles = ["notes.txt", "/etc/hostname"]')
    assert read_task(task_files(tmp_path)["a"]).files == (
        tmp_path / "notes.txt",
        Path("/etc/hostname"),
    )


def test_the_examples_of_the_documentation_have_every_field() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text()
    fields: set[str] = set()
    of_steps: set[str] = set()
    for example in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        task: dict[str, Any] = parse_task(example, "an example").model_dump(exclude_unset=True)
        fields |= task.keys()
        of_steps |= {name for step in task.get("step", ()) for name in step}
    assert fields == set(TaskTemplate.model_fields)
    assert of_steps == set(TaskStep.model_fields)


STEPS = """
[[step]]
name = "a"
prompt = "A"
files = ["x/a.txt"]
[[step]]
name = "b"
needs = ["a"]
prompt = "B ${steps.a.answer}"
check = "grep ${steps.a.answer} out"
"""


def test_a_step_gets_the_answers_of_its_needs() -> None:
    first, second = fill_steps(parse_task(STEPS, "t"), {})
    assert (first.needs, first.files, second.needs) == ((), ("x/a.txt",), ("a",))
    assert second.task({"a": "${x} it's $5"}) == FilledTask(
        "B ${x} it's $5", "grep '${x} it'\"'\"'s $5' out", ()
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[[step]]", 'prompt = "x"\n[[step]]', "and not both"),
        ('name = "b"', 'name = "a"', "two steps have the same name"),
        ('needs = ["a"]', 'needs = ["c"]', "step b needs c, which does not exist"),
        ('prompt = "A"', 'prompt = "A"\nneeds = ["b"]', "steps need each other: "),
        ('needs = ["a"]', "", "steps.a.answer, which is not in parameters or needs"),
        ("x/a.txt", "../a.txt", "is not the path of a file below /workspace"),
        ("x/a.txt", "/etc/passwd", "is not the path of a file below /workspace"),
        ("x/a.txt", "uploads/a", "is not the path of a file below /workspace"),
        ("[[step]]", 'check = "true"\n[[step]]', "check belongs to a step"),
        ("[[step]]", 'cache = "soon"\n[[step]]', "cache"),
        (
            "[[step]]",
            '[[step]]\nname = "d"\nprompt = "D"\nfiles = ["x/a.txt"]\n'
            '[[step]]\nname = "c"\nprompt = "C"\nneeds = ["a", "d"]\n[[step]]',
            "step c gets x/a.txt from two steps",
        ),
    ],
)
def test_wrong_steps_name_the_problem(old: str, new: str, problem: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_task(STEPS.replace(old, new, 1), "t")
    assert any(problem in each for each in (raised.value.details or {})["problems"]), raised.value


async def test_steps_run_at_the_same_time_and_a_failure_stops_its_successors() -> None:
    needs = {"a": (), "b": (), "c": ("a",), "d": ("c",), "e": ("b",)}
    steps = [FilledStep(name, ("x", None), {}, (), each) for name, each in needs.items()]
    both, begun, done = asyncio.Barrier(2), list[str](), list[str]()

    async def do(step: FilledStep) -> bool:
        begun.append(step.name)
        if step.name in "ab":
            await both.wait()  # hangs if they do not run at the same time
        done.append(step.name)
        return step.name != "c"

    async with asyncio.timeout(30):
        await run_steps(steps, do)
    assert sorted(begun) == ["a", "b", "c", "e"]
    begun.clear()
    async with asyncio.timeout(30):
        await run_steps(steps, do, done={"a", "b", "e"})
    assert begun == ["c"]
