"""`sbx task`: one input, many at once, and what fails."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import command
import pytest
from model_server import KEY, Asked, model_server

from sbx.agent.messages import Response, TokenUsage, ToolCall

TEMPLATE = """
description = "Counts the rows of a table"
prompt = "Count the rows of ${file} and write them to ${to}"
check = "test -s ${to}"
max_steps = 4
[parameters.file]
kind = "file"
[parameters.to]
default = "count.txt"
"""
COUNT = (
    "import csv, sys\n"
    "rows = list(csv.reader(open('/workspace/uploads/temparea/{name}')))\n"
    "open('count.txt', 'w').write(str(len(rows) - 1)); print(len(rows) - 1)"
)


def answer(request: Asked) -> Response:
    """An answer of a model that counts the rows of the file in its task."""
    last = request.messages[-1]
    if last["role"] == "tool":
        count = last["content"].split()[1]
        hostile = "\x1b]0;x\x07" if count == "7" else ""
        return Response(f"There are {count} rows{hostile}.", usage=TokenUsage(10, 5))
    name = last["content"].split()[4]
    if name == "part-03.csv":
        return Response("I give up.")
    code = json.dumps({"code": COUNT.format(name=name)})
    return Response("", (ToolCall("call-1", "run_code", code),), stop="tools")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "count.toml").write_text(TEMPLATE)
    (tmp_path / "data").mkdir()
    for number in range(20):
        rows = "".join(f"{row}\n" for row in range(number))
        (tmp_path / "data" / f"part-{number:02}.csv").write_text(f"n\n{rows}")
    return tmp_path


def run(place: Path, *words: str | Path, answers: int = 100) -> tuple[Any, int]:
    """What `sbx task run count` printed, and the number of requests to the model."""
    with model_server(*[answer] * answers) as server:
        ended = command.in_process(
            *("task", "run", "count", *words),
            BASE_URL=server.openai_url,
            API_KEY=KEY,
            MODEL_NAME="scripted",
            SBX_TASKS_DIR=str(place / "tasks"),
        )
        return ended, len(server.requests)


def test_one_input_prints_its_answer_and_saves_files(place: Path) -> None:
    file = place / "data" / "part-07.csv"
    ended, requests = run(place, "--param", f"file={file}", "--out", place / "out")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "There are 7 rows\\x1b]0;x\\x07.\n"
    assert (place / "out" / "count.txt").read_text() == "7"
    assert requests == 2
    missing, requests = run(place)
    assert missing.returncode == 2
    assert "the parameter file is missing" in missing.stderr
    assert requests == 0


def test_twenty_files_in_parallel_and_one_table(place: Path) -> None:
    pattern = f"file={place / 'data' / '*.csv'}"
    ended, _ = run(place, "--each", pattern, "--out", place / "out", "--at-once", "5", "--json")
    assert ended.returncode == 1  # one of them gives up, and its check fails
    results = sorted(map(json.loads, ended.stdout.splitlines()), key=lambda each: each["input"])
    assert [each["reason"] for each in results] == [
        "max_steps" if number == 3 else "done" for number in range(20)
    ]
    counts = [
        (place / "out" / f"{number + 1:03}" / "count.txt").read_text()
        for number in range(20)
        if number != 3
    ]
    assert counts == [str(number) for number in range(20) if number != 3]
    assert all(each["tokens"] > 0 for each in results)


def test_rows_of_a_file_and_the_table_of_results(place: Path) -> None:
    inputs = place / "inputs.csv"
    with inputs.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "to"])
        for number in (2, 3, 4):
            writer.writerow([place / "data" / f"part-{number:02}.csv", "count.txt"])
    ended, _ = run(place, "--inputs", inputs)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["input", "state", "steps", "tokens", "time", "answer"]
    assert lines[2].split()[:5] == ["part-02.csv,", "count.txt", "done", "2", "15"]
    assert "There are 2 rows." in lines[2]
    assert "max_steps" in lines[3]
    assert "There are 4 rows." in lines[4]
    assert "3 of 3:" in ended.stderr
    lines_of_json = place / "inputs.jsonl"
    lines_of_json.write_text(json.dumps({"file": str(place / "data" / "part-05.csv")}))
    ended, _ = run(place, "--inputs", lines_of_json)
    assert (ended.returncode, ended.stdout) == (0, "There are 5 rows.\n")


def test_wrong_inputs_start_nothing(place: Path) -> None:
    good = place / "data" / "part-01.csv"
    (place / "missing.csv").write_text(f"file\n{good}\n{place / 'none.csv'}\n")
    (place / "ragged.csv").write_text(f"file,to\n{good}\n")
    (place / "nested.jsonl").write_text('{"file": ["a"]}')
    (place / "broken.jsonl").write_text("{")
    for words, problem in (
        (["--param", "file"], "NAME=VALUE"),
        (["--each", "file"], "NAME=PATTERN"),
        (["--each", f"file={place}/*.txt"], "no file matches"),
        (["--each", f"file={place}/data/*", "--inputs", good], "not both"),
        (["--inputs", place / "missing.csv"], "does not exist"),
        (["--inputs", place / "ragged.csv"], "does not fit"),
        (["--inputs", place / "nested.jsonl"], "does not fit"),
        (["--inputs", place / "broken.jsonl"], "lines of JSON"),
        (["--inputs", place / "nowhere.csv"], "cannot be read"),
    ):
        ended, requests = run(place, *words)
        assert ended.returncode == 2, (words, ended.stdout, ended.stderr)
        assert problem in ended.stderr
        assert requests == 0
        assert "Traceback" not in ended.stderr


def test_a_sandbox_that_cannot_be_created_is_a_result(place: Path) -> None:
    pattern = f"file={place / 'data' / 'part-0[12].csv'}"
    ended, requests = run(place, "--each", pattern, "--policy", "nonexistent", "--json")
    assert ended.returncode == 1
    results = list(map(json.loads, ended.stdout.splitlines()))
    assert [each["reason"] for each in results] == ["error", "error"]
    assert results[0]["error"]["code"] == "policy_not_found"
    assert requests == 0


def test_templates_are_listed_and_checked(place: Path) -> None:
    tasks = place / "tasks"
    (tasks / "broken.toml").write_text("prompt = 1")
    call = partial(command.in_process, SBX_TASKS_DIR=str(tasks))
    entries = json.loads(call("task", "list", "--json").stdout)["tasks"]
    assert [(each["name"], each["problem"] is None) for each in entries] == [
        ("broken", False),
        ("count", True),
    ]
    assert "Counts the rows of a table" in call("task", "list").stdout
    assert call("task", "check", tasks / "count.toml").returncode == 0
    wrong = call("task", "check", tasks / "count.toml", tasks / "broken.toml", "--json")
    assert wrong.returncode == 2
    assert [each["ok"] for each in json.loads(wrong.stdout)["files"]] == [True, False]
    unknown = call("task", "run", "nothing")
    assert unknown.returncode == 2
    assert "sbx task list" in unknown.stderr
