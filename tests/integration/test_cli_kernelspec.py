"""`sbx kernelspec install | list | remove`, and that Jupyter finds what they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import environment, in_process


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """The user's directory of Jupyter."""
    return {"JUPYTER_DATA_DIR": str(tmp_path / "jupyter")}


def json_of(*words: str | Path, env: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        in_process("kernelspec", *words, "--json", stdin=b"", **env).stdout
    )
    return found


def test_a_kernel_is_installed_runs_a_file_as_the_readme_says_and_is_removed(
    data: dict[str, str], own_temporary_directory: Path
) -> None:
    ended = in_process("kernelspec", "install", stdin=b"", **data)
    path = Path(data["JUPYTER_DATA_DIR"]) / "kernels" / "sbx"
    assert ended.stdout == f"sbx: Python (sbx), in {path}\n"
    assert "--standalone" in ended.stderr
    directory = own_temporary_directory / "look"
    directory.mkdir()
    (directory / "look.py").write_text(
        "import os; print(os.getcwd(), os.listdir())\nopen('/etc/shadow')\n"
    )
    if os.geteuid() == 0:
        os.chown(directory, 1000, 1000)  # a directory of root's is no workspace
    ran = jupyter_run("sbx", "look.py", directory, data)
    assert ran.stdout == "/workspace ['look.py']\n"
    assert "No such file or directory: '/etc/shadow'" in ran.stderr
    (listed,) = json_of("list", env=data)["kernelspecs"]
    assert (listed["name"], listed["policy"], listed["path"]) == ("sbx", "notebook", str(path))
    assert json_of("remove", "sbx", env=data) == {"removed": listed}
    assert not path.exists()


def jupyter_run(
    kernel: str, file: str, directory: Path, env: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "jupyter_client.runapp", "--kernel", kernel, file],
        cwd=directory,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_one_below_a_prefix_is_found_there_only(data: dict[str, str], tmp_path: Path) -> None:
    place = ("--prefix", tmp_path / "lab")
    words = ("--policy", "strict", "--name", "Locked", "--display-name", "[red]", "--standalone")
    made = json_of("install", *words, *place, env=data)
    assert made == {
        "name": "locked",
        "display_name": "[red]",
        "policy": "strict",
        "standalone": True,
        "path": str(tmp_path / "lab" / "share" / "jupyter" / "kernels" / "locked"),
    }
    assert "[red]" in in_process("kernelspec", "list", *place, stdin=b"", **data).stdout
    error = json_of("remove", "locked", "--user", env=data)["error"]
    assert error["code"] == "kernelspec_not_found"


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--user", "--sys-prefix"), "validation_error", 2),
        (("--prefix", "/proc/none"), "directory_not_writable", 3),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(
    data: dict[str, str], words: tuple[str, ...], code: str, exit_code: int
) -> None:
    ended = in_process("kernelspec", "install", *words, "--json", stdin=b"", **data)
    error = json.loads(ended.stdout)["error"]
    assert (error["code"], ended.returncode) == (code, exit_code)
    assert error["hint"]
    assert not os.path.exists(data["JUPYTER_DATA_DIR"])
