"""Every surface that reports a run names its quarantined items."""

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, environment, in_process

import sbx as embedded
from sbx import Runtime
from sbx.agent.messages import ToolCall
from sbx.agent.tools.registry import Tools
from sbx.kernels import frames
from sbx.protocol.events import run_from_json, run_to_json
from sbx.protocol.runs import Quarantined, quarantine_notice
from sbx.runtime.run.frontend import Cell, JupyterFrontend

PLANT = "open('.envrc', 'w').write('x')"
WHY = ".envrc (direnv would obey it on the host)"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    top.mkdir()
    if os.geteuid() == 0:
        os.chown(top, 4242, 4242)
    return top


def test_run_prints_each_item_and_one_hint(project: Path, tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    ran = in_process("run", "--workspace", project, "-c", f"{PLANT};", stdin=b"", **env)
    first, hint = ran.stderr.splitlines()
    assert first == f"quarantined: {WHY}"
    item_id = hint.removeprefix("hint: sbx quarantine list; sbx quarantine restore ")
    assert os.listdir(project) == []
    restored = in_process("quarantine", "restore", item_id, "--yes", stdin=b"", **env)
    assert restored.stdout == f"restored {project}/.envrc\n"


def test_new_hidden_names_and_options_say_why(project: Path, tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    plant = "open('.x', 'w').write('1'); open('-y', 'w').write('2');"
    ran = in_process("run", "--workspace", project, "-c", plant, stdin=b"", **env)
    lines = {line.partition(" (")[0]: line for line in ran.stderr.splitlines()}
    assert "begins with a dot" in lines["quarantined: .x"]
    assert "would take its name for an option" in lines["quarantined: -y"]
    assert os.listdir(project) == []
    listed = in_process("quarantine", "list", stdin=b"", **env).stdout
    assert "begins with a dot" in listed
    item_ids = ran.stderr.split(" restore ")[1].split()
    restored = in_process("quarantine", "restore", *item_ids, "--yes", stdin=b"", **env)
    assert restored.returncode == 0, restored.stderr
    assert sorted(os.listdir(project)) == ["-y", ".x"]


@pytest.mark.full_tier
def test_full_quarantine_is_reported(project: Path, tmp_path: Path) -> None:
    """Code that makes 100,000 hidden files gets an error, and the user reads why."""
    plant = (
        "import errno\ntry:\n    for number in range(100_000): open(f'.{number}', 'w').close()\n"
        "except OSError as error: print(number, errno.errorcode[error.errno])"
    )
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    ran = in_process("run", "--workspace", project, "-c", plant, stdin=b"", **env)
    assert ran.stdout == "1000 ENOSPC\n"
    assert "is full with 1000 items" in ran.stderr
    assert len(ran.stderr.splitlines()) < 30
    assert os.listdir(project) == []


@pytest.mark.full_tier
def test_run_has_the_field_in_json(project: Path, tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    ran = in_process(
        "run", "--workspace", project, "--json", "--shell", "-c", "echo > .envrc", stdin=b"", **env
    )
    (item,) = json.loads(ran.stdout)["quarantined"]
    assert (item["path"], item["name"]) == (".envrc", ".envrc*")
    assert ran.stderr == ""


@pytest.mark.parametrize(("answer", "there"), [("y", [".envrc"]), ("n", [])])
def test_run_offers_to_restore_where_the_policy_asks(
    project: Path, tmp_path: Path, answer: str, there: list[str]
) -> None:
    policy = tmp_path / "asking.toml"
    policy.write_text('schema = 1\nextends = "default"\nhost_executables = "ask"\n')
    ours, theirs = pty.openpty()
    words = ["run", "--policy", policy, "--workspace", project, "-c", PLANT]
    env = environment(XDG_DATA_HOME=str(tmp_path / "data"))
    with subprocess.Popen(
        [*COMMAND, *map(str, words)], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, f"{answer}\n".encode())
        assert process.wait(60) == 0
    os.close(ours)
    assert os.listdir(project) == there


async def test_the_model_and_the_user_read_the_names(runtime: Runtime, project: Path) -> None:
    emitted: list[tuple[str, str]] = []
    async with await runtime.create(workspace=project) as box:
        call = ToolCall("call-1", "run_code", json.dumps({"code": PLANT}))
        result = await Tools().call(
            call, box.conversation("default"), lambda *piece: emitted.append(piece)
        )
    assert WHY in result.text
    assert WHY in "".join(text for _, text in emitted)


async def test_a_notebook_shows_the_names(runtime: Runtime, project: Path) -> None:
    shown: list[object] = []

    async def tell(reported: object) -> None:
        shown.append(reported)

    async with await runtime.create(workspace=project) as box:
        frontend = JupyterFrontend(box.contexts.default, tell, lambda _: None)
        await frontend.start()
        await frontend.execute(Cell(PLANT))
        await frontend.stop()
    texts = [one.text for one in shown if isinstance(one, frames.Stream) and one.name == "stderr"]
    assert any(WHY in text for text in texts)


@pytest.mark.full_tier
def test_the_blocking_sandbox_has_the_field(project: Path) -> None:
    try:
        with embedded.Sandbox(workspace=project) as box:
            run = box.run(PLANT)
            assert [item.path for item in run.quarantined] == [".envrc"]
            assert run_from_json(json.loads(json.dumps(run_to_json(run)))) == run
            assert box.run("1").quarantined == ()
    finally:
        embedded.close()


def test_a_notice_has_no_control_character_of_a_path() -> None:
    item = Quarantined("a\n\x1b[2J\u202e\udcff.envrc", ".envrc", "direnv\r", "0" * 16)
    notice = quarantine_notice((item,) * 30)
    assert notice.isascii()
    assert "\x1b" not in notice
    assert len(notice.splitlines()) == 22
