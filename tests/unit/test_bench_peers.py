"""How the bench calls the alternatives: commands, and the worker for Python libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers import install, worker
from bench.peers.command import Row, Times, _cells
from bench.samples import NotMeasured

_LIBRARY = """
class LocalPythonExecutor:
    def __init__(self, imports):
        self.imports = imports
    def send_tools(self, tools):
        self.tools = tools
    def __call__(self, code):
        self.logs = f"{code} {self.imports} {self.tools}"
        print("a library may print")
        return self
"""


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("/nonexistent/program",), "/nonexistent/program"),
        ((sys.executable, "-c", "import sys; sys.exit('no network')"), "ended with 1: no network"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "took more than 0.5 s"),
    ],
)
async def test_a_command_that_fails_is_a_reason_and_no_sample(
    command: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(NotMeasured, match=problem):
        await install.output_of(command, 0.5)


def test_the_worker_runs_code_in_a_library(tmp_path: Path) -> None:
    (tmp_path / "smolagents").mkdir()
    (tmp_path / "smolagents" / "__init__.py").touch()  # before an installed one
    (tmp_path / "smolagents" / "local_python_executor.py").write_text(_LIBRARY)
    requests = [{"open": "smolagents"}, {"run": "print(1)"}, {"close": True}]
    done = subprocess.run(
        [sys.executable, str(Path(str(worker.__file__)))],
        input="".join(json.dumps(request) + "\n" for request in requests),
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    replies = [json.loads(line)["output"] for line in done.stdout.splitlines()]
    assert replies == ["", "print(1) ['pandas'] {}", ""]


def test_a_row_without_times_has_its_problem() -> None:
    times = Times.of([1.0])
    sbx = Row("sbx", "all", True, 1, times, times, times)
    assert _cells(Row("runc", "some", False, 0, problem="not installed"), sbx) == (
        "not installed",
        "",
        "",
    )
    assert _cells(sbx, sbx) == ["1 ms (1 to 1), 1 times"] * 3
