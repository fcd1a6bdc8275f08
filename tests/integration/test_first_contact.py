"""What a new user meets: each test is an entry of a list of first surprises."""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pexpect
import pytest
from command import COMMAND, environment, in_process
from places import short_directory
from service_process import Service, service

import sbx
from sbx import Sandbox
from sbx.cli import app, output
from sbx.cli.agent_output import _without
from sbx.errors import BadRequest, Conflict, NotFound
from sbx.kernels.memory_watcher import Watcher
from sbx.policy.units import parse_duration
from sbx.protocol.runs import Cause


@pytest.fixture(scope="module")
def served() -> Iterator[Service]:
    with short_directory() as directory, service(directory) as served:
        yield served


# -- Python ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box
    sbx.close()


def test_a_sandbox_shows_its_id_and_policy(box: Sandbox) -> None:
    assert repr(box) == f"<Sandbox {box.id}, policy default>"


def test_a_traceback_is_short_and_ends_with_the_hint(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raised() -> str:
        try:
            box.files.read("nope.csv")
        except NotFound:
            return traceback.format_exc()
        raise AssertionError

    short = raised()
    assert short.splitlines()[-1] == "hint: check the path, or list its directory"
    assert len(short.splitlines()) < 25
    assert "futures" not in short
    monkeypatch.setenv("SBX_DEBUG", "1")
    assert len(raised().splitlines()) > 2 * len(short.splitlines())


def test_code_that_is_no_text_and_a_text_that_is_not_there(box: Sandbox) -> None:
    with pytest.raises(BadRequest) as raised:
        box.run(123)  # type: ignore[arg-type]
    assert raised.value.message == "the code must be a str, not int"
    box.files.write("a.txt", "hello")
    with pytest.raises(Conflict) as missing:
        box.files.replace("a.txt", "zzz", "y")
    assert missing.value.hint == "read the file: the text must be the same, with its white space"


# -- commands --------------------------------------------------------------------------------------


def test_times_are_rounded_to_the_nearest() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for seconds, expected in ((3 * 3600 - 1, "in 3 h"), (3599, "in 60 min"), (89.6, "in 90 s")):
        assert output.since((now + timedelta(seconds=seconds)).isoformat(), now) == expected


@pytest.mark.parametrize("text", ["1y", "2x", "5w"])
def test_an_unknown_unit_gets_the_units_and_no_guess(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a unit here$"):
        parse_duration(text)
    with pytest.raises(ValueError, match='did you mean "1min"'):
        parse_duration("1m")


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (("help",), "Usage: sbx [OPTIONS]"),
        (("help", "run"), "Usage: sbx run [OPTIONS]"),
        (("run", "-h"), "Usage: sbx run [OPTIONS]"),
        (("ls", "-h"), "Usage: sbx ps [OPTIONS]"),
        (("list", "-h"), "Usage: sbx ps [OPTIONS]"),
    ],
)
def test_the_usual_words_for_help_and_lists_work(words: tuple[str, ...], start: str) -> None:
    ended = in_process(*words)
    assert (ended.returncode, ended.stdout.startswith(start)) == (0, True), ended.stdout


def test_a_usage_error_names_the_help_of_its_command() -> None:
    ended = in_process("run", "--polcy", "x")
    assert ended.returncode == 2
    assert "hint: sbx run --help shows the usage" in ended.stderr
    assert "hint: sbx key create --help shows" in in_process("key", "create", "x").stderr
    assert "hint: sbx --help shows the usage" in in_process("runn").stderr


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("agent", "list"), "no agents have a profile"),
        (("task", "list"), "no templates exist in "),
        (("tool", "list"), "nothing is registered"),
        (("env", "list"), "no environments exist"),
    ],
)
def test_an_empty_list_is_a_note_and_no_table(
    tmp_path: Path, words: tuple[str, ...], note: str
) -> None:
    places = ("SBX_AGENTS_DIR", "SBX_TASKS_DIR", "SBX_TOOLS_DIR", "SBX_ENVIRONMENTS")
    listed = in_process(*words, stdin=b"", **{name: str(tmp_path) for name in places})
    assert (listed.returncode, listed.stdout) == (0, "")
    assert listed.stderr.startswith(f"note: {note}")


def test_a_state_that_does_not_exist_is_refused(served: Service) -> None:
    ended = in_process("ps", "--status", "foo", "--connect", served.socket)
    assert ended.returncode == 2
    assert "--status must be one of idle, starting, ready, failed, expired" in ended.stderr


@pytest.mark.parametrize(
    "words", [("inspect", "nosuch"), ("rm", "nosuch"), ("exec", "nosuch", "-")]
)
def test_an_unknown_id_names_the_list_once(served: Service, words: tuple[str, ...]) -> None:
    ended = in_process(*words, "--connect", served.socket, stdin=b"1")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: sandbox nosuch does not exist")
    assert "hint: sbx ps, or GET /v1/sandboxes, lists yours" in ended.stderr


def test_an_unknown_key_names_the_list(served: Service) -> None:
    ended = in_process("key", "revoke", "nosuch", "--connect", served.socket)
    assert "hint: sbx key list and sbx token list show the ids" in ended.stderr


def test_an_id_is_not_wrapped_on_a_narrow_terminal(served: Service) -> None:
    sandbox = in_process("create", "--connect", served.socket).stdout.strip()
    in_process("exec", sandbox, "-c", "1", "--connect", served.socket)
    command, *first = COMMAND
    words = [*first, "stats", "--connect", str(served.socket)]
    child = pexpect.spawn(command, words, env=environment(), dimensions=(40, 60), encoding="utf-8")
    child.expect(sandbox, timeout=60)
    child.expect(pexpect.EOF, timeout=60)
    child.close()


@pytest.mark.parametrize("words", [("logs", "-f"), ("stats", "-f")])
def test_ctrl_c_ends_a_command_that_follows_without_an_error(
    served: Service, words: tuple[str, ...]
) -> None:
    sandbox = in_process("create", "--connect", served.socket).stdout.strip()
    in_process("exec", sandbox, "-c", "1", "--connect", served.socket)
    line = [*COMMAND, *words, sandbox, "--connect", str(served.socket)]
    with subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # it follows now
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_file_that_is_missing_is_reported_before_a_sandbox_starts(tmp_path: Path) -> None:
    ended = in_process("run", "--upload", "nofile.csv", "-c", "1")
    assert ended.returncode == 2
    assert "error: file nofile.csv does not exist" in ended.stderr
    assert f"hint: relative paths are looked up in {Path.cwd()}" in ended.stderr


def test_the_check_of_a_policy_names_what_this_host_lacks(tmp_path: Path) -> None:
    env, preload = tmp_path / "env.toml", tmp_path / "preload.toml"
    env.write_text('schema = 1\nextends = "default"\ninterpreter = "env:nope"\n')
    preload.write_text('schema = 1\nextends = "default"\npreload = ["polars_nope"]\n')
    ended = in_process("policy", "check", env, preload)
    assert ended.returncode == 0
    assert "names the environment nope, which does not exist; create it" in ended.stderr
    assert "preload: polars_nope is not installed here" in ended.stderr
    ended = in_process("run", "--policy", preload, "-c", "print(1)")
    assert (ended.returncode, ended.stdout) == (0, "1\n")
    assert "note: preload: polars_nope was not imported" in ended.stderr


def test_the_hint_for_a_policy_does_not_list_the_files_next_to_it(tmp_path: Path) -> None:
    for name in ("wrong", "neighbour"):
        (tmp_path / f"{name}.toml").write_text('schema = 1\nextends = "defualt"\n')
    ended = in_process("policy", "check", tmp_path / "wrong.toml")
    assert 'policy "defualt" does not exist; did you mean default?' in ended.stdout
    assert "the policies are data-science, default" in ended.stdout
    assert "neighbour" not in ended.stdout


@pytest.mark.parametrize(("processes", "cause"), [(3, Cause.MEMORY), (64, Cause.PIDS)])
def test_a_fork_bomb_without_cgroups_is_no_question_of_memory(processes: int, cause: Cause) -> None:
    assert Watcher(1.0, tasks_max=128, descriptors=False)._cause(processes) is cause


def test_a_refused_request_is_named_at_the_end_of_a_run(tmp_path: Path) -> None:
    policy = tmp_path / "lab.toml"
    policy.write_text('schema = 1\nextends = "networked"\n[network]\nallow = ["example.com"]\n')
    code = "curl -s -o /dev/null http://example.org/; true"
    ended = in_process("run", "--policy", policy, "--shell", "-c", code)
    assert ended.returncode == 0
    assert "note: a request was refused by network.allow: example.org" in ended.stderr


def test_output_that_was_shown_live_is_not_repeated() -> None:
    result = "[stderr]\nls: cannot access 'x'\n[exit code 2]"
    assert _without(result, "ls: cannot access 'x'\n") == "[exit code 2]"


def test_a_limit_of_open_files_that_is_too_low_is_named() -> None:
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128));"
    words = (sys.executable, "-c", f"{limit} os.execv(sys.argv[1], sys.argv[1:])")
    ended = subprocess.run(
        [*words, *COMMAND, "run", "-c", "1"],
        capture_output=True,
        env=environment(),
        text=True,
        check=False,
    )
    assert ended.returncode == 3
    assert "too many open files" in ended.stderr
    assert "hint: raise RLIMIT_NOFILE" in ended.stderr


def test_ctrl_c_before_a_command_begins_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_command: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_parser", interrupt)
    ended = in_process("ps")
    assert (ended.returncode, ended.stderr) == (130, "error: interrupted\n")


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.needs("root")
def test_serve_as_another_user_needs_root() -> None:
    with as_nobody():
        ended = in_process("serve", "--user", "root")
    assert ended.returncode == 2
    assert "you are not root" in ended.stderr


@pytest.mark.needs("root")
def test_a_data_directory_that_cannot_be_made_is_an_error_of_the_setting() -> None:
    line = [sys.executable, "-m", "sbx", "serve", "--data-dir", "/proc/x/y", "--json"]
    ended = subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2, ended.stdout
    error = json.loads(ended.stdout.splitlines()[-1])["error"]
    assert (error["code"], error["hint"]) == (
        "invalid_settings",
        "choose another one with --data-dir",
    )


def test_a_client_whose_service_ends_is_told_so() -> None:
    with short_directory() as directory, service(directory, "--drain-timeout", "0") as served:
        sandbox = in_process("create", "--connect", served.socket).stdout.strip()
        code = "print('begun', flush=True); import time; time.sleep(100)"
        line = [*COMMAND, "exec", sandbox, "-c", code, "--connect", str(served.socket)]
        with subprocess.Popen(
            line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            served.stop()
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "note: another client stopped the run or its sandbox, or the service ended" in errors


def test_the_prompt_of_a_terminal_shows_that_it_is_inside(box: Sandbox) -> None:
    terminal = box.terminals.open()
    drawn = b""  # HOME is /workspace
    with terminal.attach() as client:
        for piece in client:
            drawn += piece
            if b"sbx:~$ " in drawn:
                break
    terminal.close()


def test_a_wrong_field_is_named_without_the_word_body(served: Service) -> None:
    with served.client() as client:
        reply = client.post("/v1/sandboxes", json={"ttl": "1h"})
    message = reply.json()["error"]["message"]
    assert message.startswith("the request has another shape: ttl: Input should be a valid integer")
