"""Templates of tasks: their files, and the tasks that values make of them."""

import re
from pathlib import Path
from typing import Any

import pytest

from sbx.agent.task import (
    FilledTask,
    TaskParameter,
    TaskTemplate,
    fill,
    parse_task,
    read_task,
    task_files,
)
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


def test_the_example_of_the_documentation_has_every_field() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text()
    (example, *_) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    task: dict[str, Any] = parse_task(example, "the example").model_dump(exclude_unset=True)
    assert set(task) == set(TaskTemplate.model_fields)
