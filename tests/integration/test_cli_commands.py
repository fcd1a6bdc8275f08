"""`sbx exec --background`, `sbx command` and `sbx stats` against a service of its own."""

import json
import time

import pytest
from serving import Service


@pytest.fixture(scope="module")
def box(service: Service) -> str:
    return service.quick("create").stdout.strip()


def test_a_command_is_started_followed_and_ends_as_it_did(service: Service, box: str) -> None:
    code = "for i in 1 2; do echo hello $i; sleep 0.2; done; exit 4"
    started = service.quick("exec", box, "--shell", "--background", "-c", code)
    assert started.returncode == 0
    name = started.stdout.strip()
    assert service.quick("command", "logs", box, name, "-f").stdout == "hello 1\nhello 2\n"
    ended = service.quick("command", "show", box, name, "--wait")
    assert ended.returncode == 4
    assert "exited (4)" in ended.stdout
    answer = json.loads(service.quick("command", "show", box, name, "--json").stdout)
    assert (answer["state"], answer["exit_code"], answer["log_end"]) == ("exited", 4, 16)
    piece = json.loads(
        service.quick("command", "logs", box, name, "--offset", "8", "--json").stdout
    )
    assert piece == {"offset": 8, "next_offset": 16, "text": "hello 2\n"}
    assert name in service.quick("command", "list", box).stdout


def test_stdin_is_written_and_a_command_is_stopped(service: Service, box: str) -> None:
    words = ("exec", box, "--shell", "-d", "-i", "--json", "-c", "cat; sleep 100")
    name = json.loads(service.quick(*words).stdout)["id"]
    assert service.quick("command", "write", box, name, "one").returncode == 0
    fed = service.quick("command", "write", box, name, "--end", "--json", stdin=b"two\n")
    assert json.loads(fed.stdout) == {"written": 4, "ended": True}
    late = service.quick("command", "write", box, name, "three")
    assert (late.returncode, "stdin" in late.stderr or "standard input" in late.stderr) == (3, True)
    deadline = time.monotonic() + 60
    while service.quick("command", "logs", box, name).stdout != "one\ntwo\n":
        assert time.monotonic() < deadline
    stopped = service.quick("command", "stop", box, name, "--json")
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert service.quick("command", "logs", box, name).stdout == "one\ntwo\n"


def test_what_is_wrong_is_said_in_a_sentence(service: Service, box: str) -> None:
    unknown = service.quick("command", "show", box, "cmd-nope", "--json")
    assert unknown.returncode == 2
    assert json.loads(unknown.stdout)["error"]["code"] == "not_found"
    python = service.quick("exec", box, "--background", "-c", "1")
    assert python.returncode == 2
    assert "--shell" in python.stderr


def test_hostile_output_reaches_no_terminal(service: Service, box: str) -> None:
    code = r"printf '\x1b]0;title\x07\x1b[2Jplain\n'"
    name = service.quick("exec", box, "--shell", "-d", "-c", code).stdout.strip()
    said = service.quick("command", "logs", box, name, "-f").stdout
    assert "plain" in said
    assert "\x1b" not in said


def test_stats_are_a_table_or_a_document(service: Service, box: str) -> None:
    service.quick("exec", box, "-c", "1")
    table = service.quick("stats").stdout
    assert box in table
    assert "128" in table
    (answer,) = json.loads(service.quick("stats", box, "--json").stdout)["sandboxes"]
    assert answer["id"] == box
    assert answer["kernels"] == 1
    assert answer["memory"] > 0
    missing = service.quick("stats", "sandbox-nope", "--json")
    assert missing.returncode == 2
