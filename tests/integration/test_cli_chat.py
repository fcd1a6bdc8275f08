"""`sbx chat`, driven by pexpect as a person would, with a model over HTTP or a recorded one."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest
from command import COMMAND, environment, in_process
from model_server import KEY, Asked, BrokenOff, ModelServer, model_server
from places import short_directory
from service_process import service
from serving import Service

from sbx.agent.messages import Response, TokenUsage, ToolCall
from tests.tiers import rows

WAIT_S = 60.0
PROMPT = "\r?\n> |^> "
OWNER = 4242
FIGURE = (
    "import matplotlib.pyplot as plt\n"
    "plt.bar([r['city'] for r in rows], [int(r['people']) for r in rows])\nplt.show()\n"
    "open('result.txt', 'w').write('42 people')"
)


@pytest.fixture
def places() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def calls(name: str, text: str = "", **arguments: Any) -> Response:
    call = ToolCall("call_1", name, json.dumps(arguments))
    return Response(text, (call,), TokenUsage(10, 5), "tools")


def settings(server: ModelServer) -> dict[str, str]:
    return {"BASE_URL": server.openai_url, "API_KEY": KEY, "MODEL_NAME": "scripted"}


@contextmanager
def chat(directory: Path, *words: str | Path, **env: str) -> Iterator["pexpect.spawn[str]"]:
    command, *first = COMMAND
    child = pexpect.spawn(
        command,
        [*first, "chat", "--data-dir", str(directory), *map(str, words)],
        env=environment(TERM="dumb", **env),
        dimensions=(50, 200),
        timeout=WAIT_S,
        encoding="utf-8",
    )
    child.delaybeforesend = None
    try:
        yield child
    finally:
        child.close(force=True)


def ended(child: "pexpect.spawn[str]") -> str:
    """Leave by Ctrl-D; the id of the conversation."""
    child.expect(PROMPT)
    child.sendeof()
    child.expect("sbx chat --resume (chat-[0-9a-f]+)")
    name = child.match[1]
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    return str(name)


def typed(child: "pexpect.spawn[str]", line: str) -> None:
    child.expect(PROMPT)
    child.sendline(line)


def test_a_whole_task_undone_and_resumed(places: Path) -> None:
    data = places / "towns.csv"
    data.write_text("city,people\nKumquat,3\nLoquat,39\n")
    opened = "import csv\nrows = list(csv.DictReader(open('uploads/temparea/towns.csv')))\n"
    failing = f"{opened}print(sum(int(r['inhabitants']) for r in rows))"

    def mends(asked: Asked) -> Response:
        assert "KeyError: 'inhabitants'" in asked.text
        return calls("run_code", code="print(sum(int(r['people']) for r in rows))")

    def draws(asked: Asked) -> Response:
        assert "[stdout]" in asked.messages[-1]["content"]
        return calls("run_code", "Now the figure.", code=FIGURE)

    def hears(asked: Asked) -> Response:
        assert "I undid the file changes" in asked.text
        assert "There are 42 people" in asked.text
        return Response("It is gone.")

    with model_server(
        calls("run_code", code=failing), mends, draws, Response("There are 42 people."), hears
    ) as server:
        with chat(places / "chats", **settings(server)) as child:
            typed(child, f"/upload '{data}'")
            child.expect(r"uploaded: /workspace/uploads/temparea/towns.csv \(32 bytes\)")
            typed(child, "How many people?")
            for shown in ("run_code", "KeyError", "run_code failed", r"\| 42", "run_code done"):
                child.expect(shown)
            child.expect("Now the figure.")
            child.expect("plt.show")
            child.expect("There are 42 people.")
            typed(child, "/files")
            child.expect("9  /workspace/result.txt")
            typed(child, "/undo")
            child.expect("changes undone:")
            child.expect("- /workspace/result.txt")
            conversation = ended(child)
        assert "towns.csv" in str(server.requests[0].body)  # the prompt tells of the files
        with chat(places / "chats", "--resume", **settings(server)) as child:
            child.expect(f"continuing {conversation}: 9 messages")
            typed(child, "Thanks.")
            child.expect("It is gone")
            typed(child, "/files")
            child.expect("32  /workspace/uploads/temparea/towns.csv")
            assert ended(child) == conversation
        listed = in_process("chat", "--list", "--data-dir", places / "chats")
        assert re.fullmatch(rf"{conversation}  .* ago  How many people\?\n", listed.stdout)
        assert (
            in_process("chat", "--rm", conversation, "--data-dir", places / "chats").returncode == 0
        )
        assert in_process("chat", "--list", "--data-dir", places / "chats").stdout == ""
    assert not list((places / "chats").rglob("*.csv"))


def test_ctrl_c_aborts_and_the_conversation_goes_on(places: Path) -> None:
    endless = "print('be' + 'gun', flush=True)\nwhile True: pass"
    with model_server(
        BrokenOff(Response("Let me think about " + "it " * 50), after=5, then="hang"),
        calls("run_code", code=endless),
        Response("still here"),
    ) as server:
        with chat(places, **settings(server)) as child:
            typed(child, "one")
            child.expect("Let me")
            child.sendintr()
            child.expect("aborted")
            typed(child, "two")
            child.expect("begun")
            child.sendintr()
            child.expect("aborted")
            child.expect(PROMPT)
            child.sendintr()
            child.expect("Ctrl-D ends")
            typed(child, "three")
            child.expect("still here")
            ended(child)
        said = [one["role"] for one in server.requests[-1].messages if one["role"] != "system"]
        assert said == ["user", "assistant", "user", "assistant", "tool", "user"]


@pytest.fixture
def project(places: Path) -> Path:
    top = places / "project"
    top.mkdir()
    (top / "old.txt").write_text("old\n")
    if os.geteuid() == 0:
        for path in (top, top / "old.txt"):
            os.chown(path, OWNER, OWNER)
    return top


def recording(directory: Path, *answers: Response) -> Path:
    reported = [
        {
            "content": one.content,
            "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in one.tool_calls],
            "usage": [1, 1],
            "stop": one.stop,
        }
        for one in answers
    ]
    path = directory / "recording.json"
    path.write_text(json.dumps({"model": "recorded", "answers": reported}))
    return path


@pytest.mark.core
def test_a_command_in_a_project_is_shown_with_its_effect_and_asked_for(
    places: Path, project: Path
) -> None:
    changes = "cat old.txt; echo new > new.txt; echo changed > old.txt"
    answers = recording(
        places,
        calls("execute_command", command=changes),
        Response("Denied."),
        calls("execute_command", command=changes),
        calls("execute_command", command="touch a.txt"),
        calls("execute_command", command="touch b.txt"),
        Response("Done."),
        calls("execute_command", command="rm old.txt"),
    )
    with chat(places / "chats", "--project", project, "--replay", answers) as child:
        typed(child, "change it")
        child.expect(r"\| old")  # during the trial
        child.expect("dry run on a copy of the files, without network: exit code 0")
        child.expect("would change:")
        child.expect(r"\+ /workspace/new.txt")
        child.expect("~ /workspace/old.txt")
        child.expect(r"Make these changes\?")
        child.sendline("n")
        child.expect("denied by you")
        child.expect("Denied.")
        assert not (project / "new.txt").exists()
        typed(child, "again")
        child.expect(r"Make these changes\?")
        child.sendline("y")
        child.expect("allowed by you")
        child.expect(r"Make these changes\?")
        assert (project / "new.txt").read_text() == "new\n"
        child.sendline("always")
        child.expect("first words of such commands: ")
        child.sendline("touch")
        child.expect(r"allowed by you, and from now on \(prefix\)")
        child.expect("Done.")
        assert (project / "b.txt").exists()
        typed(child, "/undo")
        child.expect("changes undone:")
        child.expect("- /workspace/b.txt")
        assert not (project / "b.txt").exists()
        typed(child, "tidy up")
        child.expect("- /workspace/old.txt")
        child.expect(r"Make these changes\?")
        child.sendintr()
        child.expect("denied by abort")
        child.expect("aborted")
        ended(child)
    assert {path.name for path in project.iterdir()} == {"old.txt", "new.txt", "a.txt"}


@pytest.mark.full_tier
def test_every_tool_in_a_project_is_asked_about_by_its_changes(places: Path, project: Path) -> None:
    cell = calls("run_code", code="x = 41; open('made.txt', 'w').write('made')")
    answers = recording(
        places,
        cell,
        calls("run_code", code="print('still', x + 1)"),
        calls("execute_command", command="ls"),
        calls("write_file", path="wrote.txt", content="wrote\n"),
        Response("Done."),
    )
    words = ("--project", project, "--replay", answers)
    with chat(places / "chats", *words) as child:
        typed(child, "change it")
        child.expect("dry run on a copy of the files: ok")
        child.expect(r"\+ /workspace/made.txt")
        child.expect(r"Make these changes\?")
        child.sendline("n")
        child.expect("denied by you")
        child.expect("still 42")
        child.expect("execute_command done")
        child.expect(r"\+ /workspace/wrote.txt")
        child.expect(r"\+wrote")
        child.expect(r"Make these changes\?")
        child.sendline("y")
        child.expect("allowed by you")
        child.expect("Done.")
        ended(child)
    assert {path.name for path in project.iterdir()} == {"old.txt", "wrote.txt"}


def asking(places: Path) -> dict[str, str]:
    """The environment of a chat that has a policy `asking`."""
    policies = places / "policies"
    policies.mkdir()
    (policies / "asking.toml").write_text(
        'schema = 1\nextends = "default"\nhost_executables = "ask"\n'
    )
    return {"SBX_POLICY_DIRS": str(policies)}


@pytest.mark.full_tier
def test_a_new_host_executable_is_always_asked_about_where_the_policy_asks(
    places: Path, project: Path
) -> None:
    (project / ".npmrc").write_text("as it was")
    answers = recording(
        places,
        calls("write_file", path=".envrc", content="echo\n"),
        calls("write_file", path="src/.vscode/tasks.json", content="{}\n"),
        calls("write_file", path=".envrc", content="other\n"),
        calls("write_file", path=".npmrc", content="other\n"),
        Response("Done."),
    )
    words = ("--project", project, "--replay", answers, "--policy", "asking", "--changes", "allow")
    with chat(places / "chats", *words, **asking(places)) as child:
        typed(child, "set it up")
        child.expect(r"\+ /workspace/.envrc")
        child.expect(r"! /workspace/.envrc  \(new, and direnv would obey it on this host\)")
        child.expect(r"Make these changes\? \[y\]es, \[n\]o: ")
        assert not (project / ".envrc").exists()
        child.sendline("y")
        child.expect("allowed by you")
        child.expect(r"tasks.json  \(new, and VS Code would obey it on this host\)")
        child.expect(r"Make these changes\?")
        child.sendline("n")
        child.expect("denied by you")
        for name in (".envrc", ".npmrc"):
            child.expect(f"'{name}' is not changed")
        child.expect("Done.")
        ended(child)
    assert (project / ".envrc").read_text() == "echo\n"
    assert (project / ".npmrc").read_text() == "as it was"
    assert not (project / "src").exists()


def test_a_new_host_executable_is_refused_where_the_policy_does_not_ask(
    places: Path, project: Path
) -> None:
    answers = recording(
        places, calls("write_file", path=".envrc", content="echo\n"), Response("Done.")
    )
    words = ("--project", project, "--replay", answers, "--changes", "allow")
    done = in_process("chat", "--data-dir", places / "chats", *words, stdin=b"go")
    assert "direnv on the host obeys" in done.stderr
    assert not (project / ".envrc").exists()


@pytest.mark.parametrize(
    ("answer", "there"), rows([("y", True), ("n", False)], ci_tier=[("y", True)])
)
def test_a_chat_offers_to_restore_where_the_policy_asks(
    places: Path, project: Path, answer: str, there: bool
) -> None:
    answers = recording(
        places, calls("execute_command", command="echo x > .envrc"), Response("Done.")
    )
    words = ("--project", project, "--replay", answers, "--policy", "asking")
    with chat(places / "chats", *words, **asking(places)) as child:
        typed(child, "plant it")
        child.expect("Done.")
        child.expect(PROMPT)
        child.sendeof()
        child.expect(rf"Restore {re.escape(str(project))}/.envrc \(direnv would obey it.*\[y/N\] ")
        assert not (project / ".envrc").exists()
        child.sendline(answer)
        if not there:
            child.expect(f"sbx quarantine list --data-dir {places}/chats")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
    assert (project / ".envrc").exists() is there


def test_the_quarantine_of_chats_is_found_without_its_directory(
    places: Path, project: Path
) -> None:
    """`sbx quarantine restore ID`, as the hint said, did not find an item of a chat."""
    answers = recording(
        places, calls("execute_command", command="echo x > .envrc"), Response("Done.")
    )
    env = {"XDG_DATA_HOME": str(places / "xdg")}

    def quarantine(*words: str | Path, **more: str) -> Any:
        done = in_process("quarantine", *words, stdin=b"", **(env | more))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    said = in_process("chat", "--project", project, "--replay", answers, stdin=b"go", **env)
    assert said.returncode == 0, said.stderr
    (name,) = re.findall("sbx quarantine restore ([0-9a-f]+)", said.stderr)
    assert [item["id"] for item in quarantine("list", "--json")["items"]] == [name]
    named = quarantine("list", "--json", "--data-dir", places / "other")
    assert named["items"] == []
    other = {"XDG_DATA_HOME": str(places / "other"), "SBX_CHAT_DIR": str(places / "xdg/sbx/chat")}
    for more in (other, {**other, "SBX_DATA_DIR": str(places / "other")}):
        assert quarantine("show", name, "--json", **more)["path"] == ".envrc"
    quarantine("restore", name, "--yes", "--json")
    assert (project / ".envrc").read_text() == "x\n"


def test_which_changes_are_asked_about_is_chosen_and_kept(places: Path, project: Path) -> None:
    def going(number: int, **arguments: str) -> Path:
        (places / str(number)).mkdir()
        return recording(places / str(number), calls("write_file", **arguments), Response("Ok."))

    inside = going(1, path="tests/a", content="a\n")
    outside = going(2, path="b", content="b\n")
    words = ("chat", "--data-dir", places / "chats", "--replay")
    new = ("--project", project, "--ask-outside", "tests/")
    assert in_process(*words, inside, *new, stdin=b"go").returncode == 0
    assert (project / "tests/a").read_text() == "a\n"
    denied = in_process(*words, outside, "--resume", stdin=b"go")
    assert "denied by nobody" in denied.stderr
    assert "`changes`" in denied.stderr
    assert not (project / "b").exists()
    assert (
        in_process(*words, outside, "--resume", "--changes", "allow", stdin=b"go").returncode == 0
    )
    assert (project / "b").read_text() == "b\n"
    for wrong in (("--changes", "some"), ("--ask-outside", "/etc"), ("--ask-outside", "..")):
        assert in_process(*words, outside, "--project", project, *wrong).returncode == 2
    assert in_process(*words, outside, "--changes", "allow").returncode == 2, "in no project"


def test_the_sandbox_may_be_in_a_service_and_is_found_again(places: Path, service: Service) -> None:
    (places / "a.txt").write_text("a\n")
    answers = recording(
        places, calls("run_code", code="open('b', 'w').write('b')"), Response("Ok.")
    )
    words = ("chat", "--data-dir", places / "chats", "--replay", answers)
    here = {"SANDBOX_DOMAIN": str(service.socket)}
    first = in_process(*words, stdin=f"/upload {places}/a.txt\ngo\n/files\n/undo".encode(), **here)
    assert first.returncode == 0, first.stderr
    assert "1  /workspace/b\n" in first.stdout
    assert "- /workspace/b" in first.stderr
    again = in_process(*words, "--resume", stdin=b"/files", **here)
    assert again.stdout == "         2  /workspace/uploads/temparea/a.txt\n"
    assert in_process(*words, "--resume", stdin=b"/files").returncode == 2
    (name,) = re.findall(r"continuing (chat-\w+)", again.stderr)
    assert in_process(*words, "--rm", name).returncode == 2
    assert "sandbox-" in service.quick("ps").stdout
    assert in_process(*words, "--rm", name, stdin=b"", **here).returncode == 0
    task = ("agent", "go", "--replay", answers, "--connect", service.socket)
    assert in_process(*task).stdout == "Ok.\n"
    assert "sandbox-" not in service.quick("ps").stdout  # neither left anything


@pytest.mark.parametrize("way", ["environment", "named file"])
def test_the_settings_of_opensandbox_choose_the_service_and_the_policy(
    places: Path, way: str
) -> None:
    """The address was refused, and the image was taken for a policy file."""
    answers = recording(places, calls("run_code", code="open('ü', 'w')"), Response("Ok."))
    key = f"sk-sbx-{'k' * 64}"
    with (
        short_directory() as top,
        service(top, "--listen", "127.0.0.1:0", env={"SBX_API_KEY": key}) as served,
    ):
        listening = next(word for word in served.log.split() if "127.0.0.1:" in word)
        port = listening.strip('",').rpartition(":")[2]
        values = {
            "SANDBOX_DOMAIN": f"localhost:{port}",
            "SANDBOX_API_KEY": key,
            "SANDBOX_IMAGE": "registry.example.org/opensandbox/code-interpreter:v1.0.1",
        }
        words = ("agent", "go", "--replay", answers)
        if way == "environment":
            done = in_process(*words, stdin=b"", **values)
        else:
            file = places / "opensandbox.env"
            file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
            done = in_process(*words, "--env-file", file)
        assert (done.returncode, done.stdout) == (0, "Ok.\n"), done.stderr
        log = (served.data / "audit.jsonl").read_text()
    assert '"what": "sandbox.create"' in log or '"what":"sandbox.create"' in log


def test_lines_of_a_pipe_are_messages_and_the_exit_code_is_the_last_one_s(places: Path) -> None:
    answers = recording(places, Response("One."), Response("Two."))
    words = ("chat", "--data-dir", places / "chats", "--replay", answers)
    done = in_process(*words, stdin=b"first\n\nsecond\n/quit\nthird\n")
    assert (done.returncode, done.stdout) == (0, "One.\nTwo.\n")
    with chat(places / "chats", "--replay", answers) as child:
        child.expect(PROMPT)
        second = in_process(*words)
        assert second.returncode == 3
        assert "another sbx chat" in second.stderr
        assert "--data-dir" in second.stderr
        child.sendline("/nonsense")
        child.expect("unknown command /nonsense")
        typed(child, "/quit")
        assert "to continue" not in child.read()  # nothing was said
    exhausted = in_process(*words, "--resume", stdin=b"1\n2\n3\n")
    assert exhausted.returncode == 1
    assert exhausted.stdout == "One.\nTwo.\n"


def test_the_sandbox_is_off_only_where_the_operator_allows_it(places: Path, project: Path) -> None:
    answers = recording(places, calls("execute_command", command="pwd; id -u"), Response("Ok."))
    words = ("chat", "--data-dir", places / "chats", "--replay", answers, "--no-sandbox")
    assert in_process(*words).returncode == 2
    refused = in_process(*words, "--project", project)
    assert refused.returncode == 3
    assert "SBX_ALLOW_HOST_MODE" in refused.stderr


def test_a_profile_decides_about_a_chat(places: Path) -> None:
    profile = places / "helper.toml"
    profile.write_text(
        'instructions = "Answer in German."\nwelcome = "Upload a table."\n'
        'tools = ["run_code"]\napprovals = {run_code = "deny"}\n'
    )
    wants = calls("run_code", code="print(1)")
    with model_server(wants, Response("denied then")) as server:
        words = ("--data-dir", places / "chats", "--profile", profile)
        ended = in_process("chat", *words, stdin=b"go", **settings(server))
        assert (ended.returncode, ended.stdout) == (0, "denied then\n"), ended.stderr
        first, second = server.requests
        assert "Answer in German." in first.text
        assert [tool["function"]["name"] for tool in first.body["tools"]] == ["run_code"]
        assert "not allowed" in second.text
        assert "note: Upload a table." in ended.stderr
