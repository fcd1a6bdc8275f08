"""`sbx task run` of a template with steps: files, failures, --resume, and the cache."""

import json
import os
from pathlib import Path
from typing import Any

import command
import pytest
from model_server import KEY, Asked, Refused, model_server

from sbx.agent.messages import Response, TokenUsage, ToolCall

TEMPLATE = """
cache = true
files = ["style.txt"]
[parameters.topic]
default = "sales"
[[step]]
name = "collect"
prompt = "COLLECT ${topic}"
files = ["data/facts.txt"]
[[step]]
name = "draw"
prompt = "DRAW ${topic}"
[[step]]
name = "report"
needs = ["collect", "draw"]
prompt = "REPORT on ${steps.collect.answer} and ${steps.draw.answer}"
check = "grep -q 'the facts' report.txt"
files = ["report.txt"]
"""
CODES = {
    "COLLECT": "import os; os.mkdir('data'); open('data/facts.txt', 'w').write('the facts')",
    "DRAW": "open('chart.txt', 'w').write('a chart')",
    "REPORT": "open('report.txt', 'w').write(open('data/facts.txt').read())",
}


class Worker:
    """A model that does each step, except those that are `broken`."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.begun: list[str] = []

    def __call__(self, request: Asked) -> Response | Refused:
        task = next(m["content"] for m in request.messages if m["role"] == "user")
        word = task.split()[0]
        if request.messages[-1]["role"] == "tool":
            return Response(f"{word.lower()}-answer", usage=TokenUsage(2, 1))
        self.begun.append(task)
        if word in self.broken:
            return Refused(400, "no")
        code = json.dumps({"code": CODES[word]})
        return Response("", (ToolCall("call-1", "run_code", code),), stop="tools")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "report.toml").write_text(TEMPLATE)
    (tmp_path / "style.txt").write_text("short")
    return tmp_path


def run_at(url: str, place: Path, *words: str | Path, model: str = "scripted") -> Any:
    return command.in_process(
        *("task", "run", place / "report.toml", *words),
        BASE_URL=url,
        API_KEY=KEY,
        MODEL_NAME=model,
        XDG_CACHE_HOME=str(place / "cache"),
    )


def run(place: Path, worker: Worker, *words: str | Path, model: str = "scripted") -> Any:
    with model_server(*[worker] * 100) as server:
        return run_at(server.openai_url, place, *words, model=model)


def documents(ended: Any) -> dict[str, dict[str, Any]]:
    return {each["step"]: each for each in map(json.loads, ended.stdout.splitlines())}


def test_steps_hand_on_answers_and_files(place: Path) -> None:
    worker = Worker()
    ended = run(place, worker, "--out", place / "out")
    assert (ended.returncode, ended.stdout) == (0, "report-answer\n"), ended.stderr
    assert worker.begun[2] == "REPORT on collect-answer and draw-answer"
    assert (place / "out" / "report" / "report.txt").read_text() == "the facts"
    assert (place / "out" / "draw" / "chart.txt").read_text() == "a chart"


def test_a_failed_step_skips_its_successors_and_resume_does_the_rest(place: Path) -> None:
    out, first = place / "out", Worker("DRAW")
    failed = run(place, first, "--no-cache", "--out", out, "--json")
    assert failed.returncode == 1
    states = {name: each["reason"] for name, each in documents(failed).items()}
    assert states == {"collect": "done", "draw": "error", "report": "skipped"}
    second = Worker()
    resumed = run(place, second, "--no-cache", "--out", out, "--resume", "--json", model="another")
    assert resumed.returncode == 0, resumed.stderr
    assert [task.split()[0] for task in second.begun] == ["DRAW", "REPORT"]
    assert (out / "report" / "report.txt").read_text() == "the facts"
    # Without --resume everything is done again.
    third = Worker()
    assert run(place, third, "--no-cache", "--out", out).returncode == 0
    assert len(third.begun) == 3
    assert run(place, third, "--resume").returncode == 2


def test_a_result_is_used_again_for_the_same_input(place: Path) -> None:
    worker = Worker()
    with model_server(*[worker] * 100) as server:

        def begun(*words: str | Path, model: str = "scripted") -> int:
            before = len(worker.begun)
            ended = run_at(server.openai_url, place, *words, model=model)
            assert ended.returncode == 0, ended.stderr
            return len(worker.begun) - before

        assert begun() == 3
        again = run_at(server.openai_url, place, "--json", "--out", place / "out")
        assert [each["cached"] for each in documents(again).values()] == [True] * 3
        assert len(worker.begun) == 3
        assert (place / "out" / "report" / "report.txt").read_text() == "the facts"
        assert begun("--no-cache") == 3
        assert begun("--param", "topic=costs") == 3
        assert begun(model="another") == 3
        assert begun("--memory", "300MiB") == 3
        (place / "style.txt").write_text("long")
        assert begun() == 3
        (place / "report.toml").write_text(TEMPLATE.replace("DRAW ", "DRAW well "))
        assert begun() == 1  # the answer is the same, and so is the input of the report
        (place / "report.toml").write_text(TEMPLATE.replace("cache = true", ""))
        assert begun() == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in place.glob("cache/sbx/tasks/*"))


def test_a_missing_output_is_an_error_of_its_step(place: Path) -> None:
    (place / "report.toml").write_text(TEMPLATE.replace("data/facts.txt", "data/none.txt", 1))
    ended = run(place, Worker(), "--json")
    collect = documents(ended)["collect"]
    assert (collect["reason"], collect["error"]["code"]) == ("error", "step_output_missing")
    assert documents(ended)["report"]["reason"] == "skipped"


def test_damaged_results_are_not_used(place: Path) -> None:
    run(place, Worker())
    for path in place.glob("cache/sbx/tasks/*.json"):
        path.write_text("{")
    worker = Worker()
    assert run(place, worker).returncode == 0
    assert len(worker.begun) == 3


def test_a_reader_that_is_gone_ends_the_command_without_a_traceback(place: Path) -> None:
    """The error of the output was in two nested groups of exceptions."""
    reader, writer = os.pipe()
    os.close(reader)
    with model_server(*[Worker()] * 20) as server:
        env = {"BASE_URL": server.openai_url, "API_KEY": KEY, "MODEL_NAME": "scripted"}
        words = ("task", "run", place / "report.toml", "--no-cache", "--json")
        with command.started(*words, env=env, stdout=writer) as process:
            os.close(writer)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 141, errors.decode()  # as after SIGPIPE, and not 70: a bug
    assert b"Traceback" not in errors
