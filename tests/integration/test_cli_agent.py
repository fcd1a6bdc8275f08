"""`sbx agent`: one task, what is told of it, and how it ended."""

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command import in_process, started
from model_server import KEY, ModelServer, Refused, model_server

from sbx.agent.messages import Response, TokenUsage, ToolCall


def calls(*made: tuple[str, Mapping[str, Any]], text: str = "") -> dict[str, Any]:
    """An answer of a recording."""
    return {
        "content": text,
        "tool_calls": [{"name": name, "arguments": json.dumps(args)} for name, args in made],
        "usage": [40, 2],
        "stop": "tools" if made else "end",
    }


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Sums the numbers of an upload, after a mistake; takes three steps."""
    read = "rows = open('/workspace/uploads/temparea/numbers.csv').read().split()\n"
    summed = "total = sum(map(int, rows[1:]))\nopen('total.txt', 'w').write(str(total))\ntotal"
    path = tmp_path / "recording.json"
    answers = [
        calls(("run_code", {"code": read + "print('seen'); rows['n']"}), text="I look.\n"),
        calls(("run_code", {"code": summed}), ("write_file", {"path": ".envrc", "content": "x"})),
        calls(text="It is \x1b]0;6\x07."),
    ]
    path.write_text(json.dumps({"model": "recorded", "answers": answers}))
    (tmp_path / "numbers.csv").write_text("n\n1\n2\n3\n")
    return path


def settings(server: ModelServer) -> dict[str, str]:
    return {"BASE_URL": server.openai_url, "API_KEY": KEY, "MODEL_NAME": "scripted"}


def agent(recording: Path, *words: str | Path) -> "subprocess.CompletedProcess[str]":
    data = recording.parent / "numbers.csv"
    return in_process("agent", "Sum n", "--file", data, "--replay", recording, *words)


def test_text_goes_to_stdout_tools_to_stderr_and_what_it_wrote_is_saved(recording: Path) -> None:
    out = recording.parent / "out"
    ended = agent(recording, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "I look.\nIt is \\x1b]0;6\\x07.\n"
    shown = ("print('seen')", "| seen", "TypeError", "run_code failed", "  | 6", "run_code done")
    places = [ended.stderr.index(text) for text in shown]
    assert places == sorted(places)
    assert (out / "total.txt").read_text() == "6"
    assert [path.name for path in out.rglob("*")] == ["total.txt"]  # no upload, nothing hidden


def test_no_repository_is_among_the_files_that_are_saved(tmp_path: Path) -> None:
    """A repository without a `.git` has no hidden file, and git obeys its configuration."""
    code = (
        "import os, pathlib\n"
        "for name in ('objects', 'refs'):\n"
        "    os.makedirs(f'lib/{name}')\n"
        "    pathlib.Path(f'lib/{name}/x').write_text('')\n"
        "pathlib.Path('lib/HEAD').write_text('ref: refs/heads/main')\n"
        "pathlib.Path('lib/config').write_text('[core]\\nfsmonitor = touch M\\n')\n"
        "pathlib.Path('total.txt').write_text('6')"
    )
    path = tmp_path / "recording.json"
    answers = [calls(("run_code", {"code": code})), calls(text="Done.")]
    path.write_text(json.dumps({"model": "recorded", "answers": answers}))
    out = tmp_path / "out"
    ended = in_process("agent", "?", "--replay", path, "--out", out, "--json")
    assert ended.returncode == 0, ended.stderr
    assert [one.name for one in out.rglob("*")] == ["total.txt"]
    assert "left out: lib (git would obey it on the host)" in ended.stderr
    saved = json.loads(ended.stdout.splitlines()[-1])
    assert saved["paths"] == [str(out / "total.txt")]
    assert {"path": "lib", "name": "git directory", "program": "git"} in saved["left_out"]


def test_events_and_the_exit_codes_of_each_end(recording: Path) -> None:
    ended = agent(recording, "--json", "--max-steps", "1")
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 4
    assert events[0] == {
        "type": "run_start",
        "model": "recorded",
        "max_steps": 1,
        "sandboxed": True,
    }
    assert events[-1]["type"] == "run_end"
    assert events[-1]["reason"] == "max_steps"
    assert ended.stderr == ""
    assert agent(recording, "--max-tokens", "42").returncode == 5


def test_a_setting_that_is_missing_or_wrong_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no .env is
    for name in ("MODEL_NAME", "API_KEY", "BASE_URL", "MODEL_PROVIDER"):
        monkeypatch.delenv(name, raising=False)
    ended = in_process("agent", "hello")
    assert ended.returncode == 2
    assert "MODEL_NAME" in ended.stderr
    ended = in_process("agent", "hello", "--model", "m", "--json")
    assert json.loads(ended.stdout)["error"]["code"] == "missing_setting"
    assert "API_KEY" in ended.stdout
    ended = in_process("agent", "hello", MODEL_PROVIDER="acme")
    assert ended.returncode == 2
    assert "MODEL_PROVIDER" in ended.stderr
    for words in ((" ",), ("hello", "--replay", "nowhere.json")):
        assert in_process("agent", *words).returncode == 2


def test_a_planted_env_file_does_not_choose_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code inside wrote `.env`: the user's next task, and the files that the agent read, went to a
    server of the attacker, and no line named it. (holes 1.8)"""
    monkeypatch.chdir(tmp_path)
    with model_server(Response("theirs")) as theirs, model_server(Response("mine")) as mine:
        planted = settings(theirs) | {"MAX_STEPS": "3"}
        lines = "".join(f"{name}={value}\n" for name, value in planted.items())
        (tmp_path / ".env").write_text(lines)
        ended = in_process("agent", "My secret plan", stdin=b"", **settings(mine))
        assert (ended.returncode, ended.stdout) == (0, "mine\n"), ended.stderr
        assert theirs.requests == []
        note = ".env of this directory does not set BASE_URL, API_KEY, MODEL_NAME"
        assert note in ended.stderr
        assert "--env-file .env" in ended.stderr
        for name in ("MODEL_NAME", "API_KEY", "BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        ended = in_process("agent", "x", stdin=b"", OPENAI_API_KEY="sk-of-the-user")
        assert ended.returncode == 2  # no model is set
        assert theirs.requests == []
        ended = in_process("agent", "x", "--env-file", ".env", stdin=b"")
        assert (ended.returncode, ended.stdout) == (0, "theirs\n"), ended.stderr
        server = theirs.openai_url.split("/")[2]
        assert f"the model's server is {server}\n" in ended.stderr
        assert note not in ended.stderr
        assert KEY not in ended.stderr


def test_a_provider_that_refuses_fails_the_run_and_ctrl_c_aborts_it(tmp_path: Path) -> None:
    code = json.dumps({"code": "print('begun', flush=True)\nwhile True: pass"})
    endless = Response("", (ToolCall("a", "run_code", code),), TokenUsage(1, 1), "tools")
    with model_server(Refused(403, "no credit"), endless) as server:
        env = settings(server)
        ended = in_process("agent", "hello", stdin=b"", **env)
        assert ended.returncode == 1
        assert KEY not in ended.stderr
        with started("agent", "hello", env=env) as process:
            assert process.stderr is not None
            while b"begun" not in (line := process.stderr.readline()):
                assert line, "it ended"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert b"aborted" in err


def test_a_provider_of_the_other_dialect_is_told_the_results_and_serves_as_well() -> None:
    code = json.dumps({"code": "print(6 * 7)"})
    wants = Response(
        "I count.\n", (ToolCall("toolu_1", "run_code", code),), TokenUsage(30, 5), "tools"
    )
    with model_server(wants, Response("It is 42.")) as server:
        env = {**settings(server), "MODEL_PROVIDER": "anthropic", "BASE_URL": server.anthropic_url}
        ended = in_process("agent", "How much?", stdin=b"", **env)
        assert (ended.returncode, ended.stdout) == (0, "I count.\nIt is 42.\n"), ended.stderr
        assert "  | 42" in ended.stderr
        assert KEY not in ended.stderr
        assert [asked.dialect for asked in server.requests] == ["anthropic", "anthropic"]
        first, second = (asked.body for asked in server.requests)
        assert "run_code" in [tool["name"] for tool in first["tools"]]
        [_, call], [result] = (message["content"] for message in second["messages"][-2:])
        assert (call["type"], call["input"]) == ("tool_use", {"code": "print(6 * 7)"})
        assert (result["type"], result["tool_use_id"]) == ("tool_result", call["id"])
        assert "42" in json.dumps(result["content"])


def test_what_is_recorded_can_be_replayed(tmp_path: Path) -> None:
    with model_server(Response("forty-two")) as server:
        recorded = tmp_path / "r.json"
        ended = in_process("agent", "?", "--record", recorded, stdin=b"", **settings(server))
        assert ended.stdout == "forty-two\n", ended.stderr
    assert in_process("agent", "?", "--replay", recorded).stdout == "forty-two\n"
    assert KEY not in recorded.read_text()


# -- profiles -------------------------------------------------------------------------------------

PROFILE = """
description = "Counts"
instructions = "Answer in German."
tools = ["run_code", "execute_command"]

[model]
temperature = 0.5

[approvals]
execute_command = "ask"

[limits]
max_steps = 2
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    (tmp_path / "counter.toml").write_text(PROFILE)
    (tmp_path / "broken.toml").write_text('steps = 3\ntools = ["run_cod"]\n')
    return tmp_path


def test_a_profile_decides_about_the_run(agents: Path) -> None:
    code = {"code": "1"}
    wants = [
        Response("", (ToolCall(f"call-{number}", name, json.dumps(arguments)),), stop="tools")
        for number, (name, arguments) in enumerate(
            [("execute_command", {"command": "id"}), ("run_code", code), ("run_code", code)]
        )
    ]
    with model_server(*wants) as server:
        env = {**settings(server), "SBX_AGENTS_DIR": str(agents)}
        ended = in_process("agent", "Count", "--profile", "counter", stdin=b"", **env)
        assert ended.returncode == 4, ended.stderr
        first, second = server.requests
        assert "Answer in German." in first.text
        assert first.body["temperature"] == 0.5
        names = [tool["function"]["name"] for tool in first.body["tools"]]
        assert names == ["run_code", "execute_command"]
        assert "denied" in second.text
        server.forget()
        server.add(wants[1], wants[2], Response("done"))
        words = ("--profile", agents / "counter.toml", "--max-steps", "5")
        assert in_process("agent", "Count", *words, stdin=b"", **settings(server)).returncode == 0


def test_a_sub_agent_works_in_a_sandbox_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "boss.toml").write_text("[delegate]\nmax_steps = 3\n")
    recording = tmp_path / "recording.json"
    write = "open('part.txt', 'w').write('from the sub-agent'); open('other.txt', 'w')"
    look = "import os; print(sorted(os.listdir('.')), open('part.txt').read())"
    answers = [
        calls(("delegate", {"task": "Write part.txt", "returns": ["part.txt"]})),
        calls(("run_code", {"code": write})),
        calls(text="written"),
        calls(("run_code", {"code": look})),
        calls(text="complete"),
    ]
    recording.write_text(json.dumps({"model": "recorded", "answers": answers}))
    words = ("--profile", tmp_path / "boss.toml", "--replay", recording, "--json")
    ended = in_process("agent", "Write it", *words)
    assert ended.returncode == 0, ended.stderr
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    results = [event["result"] for event in events if event["type"] == "tool_end"]
    assert results[0].startswith("written")
    assert "['part.txt', 'uploads'] from the sub-agent" in results[1]
    assert events[-1]["usage"] == {"input_tokens": 200, "output_tokens": 10}


def test_profiles_are_listed_shown_and_checked(agents: Path) -> None:
    env = {"SBX_AGENTS_DIR": str(agents)}
    broken, counter = json.loads(in_process("agent", "list", "--json", stdin=b"", **env).stdout)[
        "agents"
    ]
    assert (broken["agent_id"], broken["problem"]["code"]) == ("broken", "invalid_profile")
    assert (counter["agent_id"], counter["profile"]["limits"]["max_steps"]) == ("counter", 2)
    table = in_process("agent", "list", stdin=b"", **env).stdout
    assert "Counts" in table
    assert "no tool has the name run_cod; run_code has" in table
    shown = in_process("agent", "show", "counter", stdin=b"", **env).stdout
    (agents / "again.toml").write_text(shown)
    assert 'instructions = "Answer in German."' in shown
    right = in_process("agent", "check", agents / "counter.toml", agents / "again.toml")
    assert (right.returncode, right.stdout.count(": ok")) == (0, 2)
    wrong = in_process("agent", "check", agents / "broken.toml", "--json")
    assert wrong.returncode == 2
    (checked,) = json.loads(wrong.stdout)["files"]
    assert checked["problems"] == [
        "tools: no tool has the name run_cod; run_code has",
        "steps: a profile has no such field",
    ]
    for words in (("show", "broken"), ("show", "missing"), ("run", "x", "--profile", "missing")):
        assert in_process("agent", *words, stdin=b"", **env).returncode == 2


def test_a_task_may_have_the_name_of_a_command(recording: Path) -> None:
    path = recording.parent / "one.json"
    path.write_text(json.dumps({"model": "recorded", "answers": [calls(text="listed")]}))
    assert in_process("agent", "run", "list", "--replay", path).stdout == "listed\n"
    assert in_process("agent", "--replay", path, "any").stdout == "listed\n"


def test_a_check_decides_about_the_end(recording: Path) -> None:
    path = recording.parent / "checked.json"
    write = {"path": "ok.txt", "content": "1"}
    answers = [calls(text="Done."), calls(("write_file", write)), calls(text="Now.")]
    path.write_text(json.dumps({"model": "recorded", "answers": answers}))
    ended = in_process("agent", "?", "--replay", path, "--check", "cat ok.txt")
    assert ended.returncode == 0, ended.stderr
    assert "completion_check failed" in ended.stderr
    assert "completion_check done" in ended.stderr
    assert ended.stdout.split() == ["Done.", "Now."]
    again = in_process("agent", "?", "--replay", path, "--check", "false", "--max-steps", "1")
    assert again.returncode == 4
