"""Each program of examples/ runs as its docstring says, and prints what it should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PRINTED = {
    "embed_in_fastapi": """\
ann x = 6 -> {'status': 'ok', 'output': '', 'error': None}
ann x * 7 -> {'status': 'ok', 'output': '42\\n', 'error': None}
bob x -> {'status': 'error', 'output': '', 'error': "name 'x' is not defined"}
""",
    "agent_with_approvals": """\
approved echo hello > note.txt
denied rm note.txt
hello
""",
    "mcp_client": """\
tools: run_code, execute_command, read_file, write_file, edit_file, list_files
x = 6 -> (no output)
print(x * 7) -> [stdout]
42
open('/etc/shadow') -> error
""",
    "network_and_secret": """\
a placeholder
b'{"customers": 3}'
403
403

""",
    "agent_tasks": """\
analysis: 3 runs done in 7 steps
suite: 1 runs done in 5 steps
scrape: 1 runs done in 3 steps
files: 20 runs done in 40 steps
""",
    "fan_out 60": "60 snippets: 58 ok, 1 timeout, 1 killed: memory\n",
    "custom_tool": """\
result: 3
result: [stdout]
1.5 EUR
Three apples are left; they cost 1.50 EUR.
""",
}


def run(name: str, *words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.needs("namespaces", "memory")
@pytest.mark.parametrize("words", PRINTED)
def test_example_prints_its_result(words: str, tmp_path: Path) -> None:
    name, *arguments = words.split()
    assert run(name, *arguments, cwd=tmp_path) == PRINTED[words]


def test_upload_is_analysed_and_its_results_are_saved(tmp_path: Path) -> None:
    penguins = pytest.importorskip("palmerpenguins", reason="needs the extra: sbx[demo]")
    data = Path(penguins.__file__).parent / "data" / "penguins.csv"
    printed = run("analyse_upload", data, "species", tmp_path / "out", cwd=tmp_path)
    assert [line.split()[-1] for line in printed.splitlines()[1:4]] == ["152", "124", "68"]
    assert (tmp_path / "out" / "counts.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (tmp_path / "out" / "counts.csv").read_text().splitlines()[1] == "Adelie,152"


def test_notebook_runs_in_the_sandbox(own_temporary_directory: Path) -> None:
    directory = own_temporary_directory / "notebook"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, 4242, 4242)
    printed = run("run_notebook", directory, cwd=own_temporary_directory)
    assert printed.splitlines() == [
        "import os; os.listdir() -> ['table.csv']",
        "sum(range(10)) -> 45",
        "os.path.exists('/etc/shadow') -> False",
    ]
