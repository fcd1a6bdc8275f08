"""`sbx run FILE`: a script has its arguments, its name, the modules beside it and its lines."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import in_process

from sbx.cli.doctor import _other_sbx
from sbx.cli.script import NotebookCell, PythonScript, cells_of, language_for, modules_of
from sbx.errors import BadRequest

SCRIPT = """import sys
from pathlib import Path

import helper
from pkg import deep

Path("made.txt").write_text("made")
print(sys.argv[1:], Path(__file__).name, __name__, helper.X, deep.Y)
if sys.argv[1:] == ["fail"]:
    raise ValueError("boom")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("import other\nX = other.X\n")
    (tmp_path / "other.py").write_text("X = 1\n")
    (tmp_path / "unused.py").write_text("secret = 1\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "deep.py").write_text("Y = 2\n")
    return tmp_path / "s.py"


def test_a_script_has_arguments_modules_and_a_name_and_its_files_come_out(script: Path) -> None:
    out = script.parent / "out"
    ended = in_process("run", "--out", out, script, "--", "a", "--flag")
    assert (ended.returncode, ended.stdout) == (0, "['a', '--flag'] s.py __main__ 1 2\n")
    assert {path.name for path in out.rglob("*")} == {"made.txt"}  # not the copied modules
    assert "saved: " in ended.stderr


def test_a_traceback_names_the_file_and_the_line(script: Path) -> None:
    ended = in_process("run", script, "fail")
    assert ended.returncode == 1
    place = 'File "/workspace/s.py", line 10, in <module>'
    assert ended.stderr.splitlines()[:2] == ["Traceback (most recent call last):", f"  {place}"]


def test_a_script_in_a_mounted_workspace_runs_in_its_place(script: Path) -> None:
    ended = in_process("run", "--workspace", script.parent, script, "x")
    assert (ended.returncode, ended.stdout) == (0, "['x'] s.py __main__ 1 2\n")
    assert (script.parent / "made.txt").read_text() == "made"
    refused = in_process("run", "--workspace", script.parent, script, "--out", script.parent / "o")
    assert refused.returncode == 2


def test_a_notebook_runs_cell_by_cell_until_one_fails(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "source": ["x = 6 * 7\n", "x"]},
        {"cell_type": "markdown", "source": "text"},
        {"cell_type": "code", "source": "x + 1"},
        {"cell_type": "code", "source": "raise KeyError(x)"},
        {"cell_type": "code", "source": "print('never')"},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    ended = in_process("run", tmp_path / "n.ipynb")
    assert (ended.returncode, ended.stdout) == (1, "42\n43\n")
    assert "KeyError" in ended.stderr
    assert in_process("run", "--json", tmp_path / "n.ipynb").returncode == 2
    (tmp_path / "n.ipynb").write_text('{"cells": []')
    assert "is not a notebook" in in_process("run", tmp_path / "n.ipynb").stderr


def tagged(source: str, *tags: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)}}


NOTEBOOKS: dict[str, tuple[list[dict[str, Any]], int, str]] = {
    "an expected error": (
        [tagged("1 / 0", "raises-exception"), tagged("print('after')")],
        0,
        "after\n",
    ),
    "an expected error at the end": (
        [tagged("print('before')"), tagged("1 / 0", "raises-exception")],
        0,
        "before\n",
    ),
    "an error after an expected one": (
        [tagged("1 / 0", "raises-exception"), tagged("1 / 0"), tagged("print('never')")],
        1,
        "",
    ),
    "an end that no tag expects": (
        [tagged("import os; os._exit(3)", "raises-exception"), tagged("print('never')")],
        137,
        "",
    ),
    "a cell to skip": (
        [tagged("print('never')", "skip-execution", "x"), tagged("print('run')", "x")],
        0,
        "run\n",
    ),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_tags_of_cells_are_those_of_nbclient(tmp_path: Path, name: str) -> None:
    cells, code, shown = NOTEBOOKS[name]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    ended = in_process("run", tmp_path / "n.ipynb")
    assert (ended.returncode, ended.stdout) == (code, shown)
    assert ended.stderr.count("ZeroDivisionError: division") == sum(
        "1 / 0" in cell["source"] for cell in cells
    )


@pytest.mark.parametrize(
    "metadata",
    [
        {"kernelspec": {"name": "ir", "language": "R"}},
        {"language_info": {"name": "R"}, "kernelspec": {"name": "ir"}},
    ],
)
def test_a_notebook_in_another_language_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any]
) -> None:
    book = {"cells": [tagged("x <- 1")], "nbformat": 4, "metadata": metadata}
    (tmp_path / "n.ipynb").write_text(json.dumps(book))
    refused = in_process("run", tmp_path / "n.ipynb")
    assert refused.returncode == 2
    assert "is a notebook in R" in refused.stderr


def test_a_first_line_chooses_the_language_and_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/usr/bin/env -S bash -e\necho from bash $1\n")
    assert in_process("run", tmp_path / "tool", "you").stdout == "from bash you\n"
    (tmp_path / "a.rb").write_text("puts 1\n")
    refused = in_process("run", tmp_path / "a.rb")
    assert (refused.returncode, "the ending .rb" in refused.stderr) == (2, True)
    assert in_process("run", "-l", "python", tmp_path / "a.rb").returncode == 1


@pytest.mark.parametrize(
    ("file", "code", "language"),
    [
        ("a.py", b"", None),
        ("a", b"1", None),
        ("a", b"#!/usr/bin/python3\n1", None),
        ("a.txt", b"#!/bin/sh\n", "bash"),
        ("a.js", b"", "javascript"),
        ("a", b"#!/usr/bin/env node\n", "javascript"),
        ("n.ipynb", b"{}", None),
    ],
)
def test_language_of_a_file(file: str, code: bytes, language: str | None) -> None:
    assert language_for(None, file, code, shell=False) == language


@pytest.mark.parametrize(("file", "code"), [("a.exe", b""), ("a", b"#!/usr/bin/perl\n")])
def test_what_is_no_script_is_refused(file: str, code: bytes) -> None:
    with pytest.raises(BadRequest):
        language_for(None, file, code, shell=False)


def test_only_the_modules_that_it_imports_are_copied(script: Path, tmp_path: Path) -> None:
    (tmp_path / "pkg" / "data.json").write_text("{}")
    code = SCRIPT.encode()
    names = {str(path.relative_to(tmp_path)) for path in modules_of(script, code)}
    package = {"pkg/__init__.py", "pkg/deep.py", "pkg/data.json"}
    assert names == {"helper.py", "other.py", *package}
    plan = PythonScript.of(script, code, None)
    assert (plan.path, set(plan.files)) == ("/workspace/s.py", {*names, "s.py"})
    assert PythonScript.of(script, code, tmp_path).files == {}
    for number in range(501):
        (tmp_path / "pkg" / f"m{number}.py").write_text("")
    with pytest.raises(BadRequest) as many:
        modules_of(script, code)
    assert many.value.code == "too_many_modules"


def test_cells_of_a_notebook_are_its_code() -> None:
    cells = [{"cell_type": "code", "source": " \n"}, {"cell_type": "code", "source": ["1\n", "2"]}]
    assert cells_of(json.dumps({"cells": cells}), "n") == [NotebookCell("1\n2")]
    with pytest.raises(BadRequest, match="it has no code"):
        cells_of(json.dumps({"cells": cells[:1]}), "n")


def test_a_missing_module_names_the_way_to_get_it() -> None:
    ended = in_process("run", "-c", "import no_such_module_anywhere")
    assert ended.returncode == 1
    assert ended.stderr.endswith("creates one with sbx env create NAME PACKAGE.\n")
    inside = in_process("run", "-c", "import os.nothing")  # no package would help
    assert "sbx env create" not in inside.stderr


def test_an_installation_from_inside_names_the_way_to_get_a_package(tmp_path: Path) -> None:
    code = "!pip install --retries 0 --quiet no-such-package-anywhere"
    (tmp_path / "install.ipy").write_text(code)
    ended = in_process("run", tmp_path / "install.ipy")
    assert ended.stdout.endswith("creates one with sbx env create NAME PACKAGE.\n")


def test_doctor_names_another_sbx_that_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sbx"
    program.write_text("#!/bin/sh\necho docker\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert _other_sbx() == program
    program.write_text("#!/usr/bin/python3\nfrom sbx.cli import main\n")
    assert _other_sbx() is None
