"""Programs that sbx starts on the host obey no file of the working directory.

Each test works in a directory in which code inside could have written everything, with an empty
entry in PYTHONPATH and `.` in PATH, as careless shells have them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command import environment

from sbx.isolation.host import host_plan
from sbx.jupyter.kernelspec import kernel_json
from tests.tiers import rows

MODULES = (
    *("sbx", "msgspec", "pydantic", "json", "asyncio", "platformdirs", "pip", "uv", "typing"),
    *("sitecustomize", "usercustomize", "IPython", "psutil", "dotenv", "socket", "jupyter_client"),
)
PROGRAMS = (
    *("bwrap", "python", "python3", "python3.12", "uv", "pip", "node", "git", "systemd-run", "env"),
    *("npx", "sh", "bash", "xdg-open", "www-browser", "java", "go"),
)
RECORDING = {
    "model": "m",
    "answers": [{"content": "done", "tool_calls": [], "usage": [1, 1], "stop": "end"}],
}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory with a trap of each kind. A trap that acts makes a file `ran-…` above it."""
    directory = tmp_path / "project"
    for name in MODULES:
        package = directory / name
        package.mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (package / file).write_text(f"open({str(tmp_path / f'ran-{name}')!r}, 'w')\n")
    for name in PROGRAMS:
        # Not by the name of a package: those are directories already.
        program = directory / name
        if not program.exists():
            program.write_text(f"#!/bin/sh\necho >> {tmp_path}/ran-{name}\nexit 1\n")
            program.chmod(0o755)
    trap = f"{directory}/bwrap"
    (directory / ".env").write_text(f"SBX_BWRAP={trap}\nBASE_URL=http://127.0.0.1:9\nAPI_KEY=x\n")
    (directory / "sbx.toml").write_text(f"bwrap = {trap!r}\n[agent]\nbase_url = 'http://h'\n")
    for name in ("pip.conf", "uv.toml", "pyvenv.cfg", ".npmrc", "setup.cfg"):
        (directory / name).write_text(
            "home = /nonexistent\n[global]\nindex-url = http://127.0.0.1:9\n"
        )
    server = {"mcpServers": {"evil": {"command": trap, "args": []}}}
    (directory / ".mcp.json").write_text(json.dumps(server))
    for name in ("tools", "agents", "policies"):
        (directory / name).mkdir()
        (directory / name / "evil.toml").write_text(f"[mcp]\ncommand = [{trap!r}]\n")
    kernels = directory / "share/jupyter/kernels/sbx"
    kernels.mkdir(parents=True)
    kernel = {"argv": [trap, "{connection_file}"], "display_name": "sbx", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    (tmp_path / "recording.json").write_text(json.dumps(RECORDING))
    return directory


def run(words: Sequence[str], directory: Path) -> "subprocess.CompletedProcess[str]":
    env = environment(PYTHONPATH=os.pathsep, PATH=f".:{os.environ['PATH']}")
    return subprocess.run(
        words, cwd=directory, env=env, capture_output=True, text=True, check=False
    )


def traps(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.parent.glob("ran-*"))


@pytest.mark.core
@pytest.mark.unprivileged
@pytest.mark.parametrize(
    "words",
    rows(
        [
            "run -c print(1)",
            "run --workspace . -c print(1)",
            "run --language bash -c pwd",
            "agent x --replay ../recording.json",
            "env pythons",
            "doctor",
        ],
        ci_tier=["run --workspace . -c print(1)", "agent x --replay ../recording.json"],
    ),
)
def test_no_start_obeys_the_working_directory(planted: Path, words: str) -> None:
    """`sbx console` started `python -m sbx` there. The others must not do the like either."""
    done = run([sys.executable, "-I", "-m", "sbx", *words.split()], planted)
    assert traps(planted) == [], done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or words == "doctor", done.stderr


def test_a_kernelspec_starts_without_the_directory_of_the_notebook(planted: Path) -> None:
    """Jupyter starts a kernel in the notebook's directory. With `-P`, an empty entry of PYTHONPATH
    still imported from there."""
    argv = kernel_json("strict", "x")["argv"]
    end = argv.index("sbx.jupyter") + 1
    done = run([*argv[:end], "--help"], planted)
    assert (done.returncode, traps(planted)) == (0, []), done.stderr
    assert "A jailed kernel." in done.stdout
    run([sys.executable, "-m", "sbx.jupyter", "--help"], planted)
    assert traps(planted)  # the control


def test_a_session_without_walls_starts_without_the_project(planted: Path) -> None:
    """Only its own code may import from the project, not the start of the kernel."""
    plan = host_plan("host", planted, {})
    env = {"PATH": os.environ["PATH"]}
    for command, is_hit in ((plan.command, False), ((sys.executable, plan.command[-1]), True)):
        words = [word for word in command if word != "-P"] if is_hit else list(command)
        more = {"PYTHONPATH": str(planted)} if is_hit else {}
        subprocess.run(
            [*words, "98", "99"], cwd=planted, env=env | more, capture_output=True, check=False
        )
        assert bool(traps(planted)) is is_hit
