"""`sbx exec --background`, `sbx command` and `sbx stats` against a service of its own."""

import json
from collections.abc import Iterator

import pytest
from serving import Service, service


@pytest.fixture(scope="module")
def served() -> Iterator[Service]:
    with service() as running:
        yield running


@pytest.fixture(scope="module")
def box(served: Service) -> str:
    return served.quick("create").stdout.strip()


def test_a_command_is_started_followed_and_ends_as_it_did(served: Service, box: str) -> None:
    code = "for i in 1 2; do echo hello $i; sleep 0.2; done; exit 4"
    started = served.quick("exec", box, "--shell", "--background", "-c", code)
    assert started.returncode == 0
    name = started.stdout.strip()
    assert served.quick("command", "logs", box, name, "-f").stdout == "hello 1\nhello 2\n"
    ended = served.quick("command", "show", box, name, "--wait")
    assert ended.returncode == 4
    assert "exited (4)" in ended.stdout
    told = json.loads(served.quick("command", "show", box, name, "--json").stdout)
    assert (told["state"], told["exit_code"], told["log_end"]) == ("exited", 4, 16)
    piece = json.loads(served.quick("command", "logs", box, name, "--offset", "8", "--json").stdout)
    assert piece == {"offset": 8, "next_offset": 16, "text": "hello 2\n"}
    assert name in served.quick("command", "list", box).stdout


def test_stdin_is_written_and_a_command_is_stopped(served: Service, box: str) -> None:
    words = ("exec", box, "--shell", "-d", "-i", "--json", "-c", "cat; sleep 100")
    name = json.loads(served.quick(*words).stdout)["id"]
    assert served.quick("command", "write", box, name, "one").returncode == 0
    fed = served.quick("command", "write", box, name, "--end", "--json", stdin=b"two\n")
    assert json.loads(fed.stdout) == {"written": 4, "ended": True}
    late = served.quick("command", "write", box, name, "three")
    assert (late.returncode, "stdin" in late.stderr or "standard input" in late.stderr) == (3, True)
    stopped = served.quick("command", "stop", box, name, "--json")
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert served.quick("command", "logs", box, name).stdout == "one\ntwo\n"


def test_what_is_wrong_is_said_in_a_sentence(served: Service, box: str) -> None:
    unknown = served.quick("command", "show", box, "cmd-nope", "--json")
    assert unknown.returncode == 2
    assert json.loads(unknown.stdout)["error"]["code"] == "not_found"
    python = served.quick("exec", box, "--background", "-c", "1")
    assert python.returncode == 2
    assert "--shell" in python.stderr


def test_hostile_output_reaches_no_terminal(served: Service, box: str) -> None:
    code = r"printf '\x1b]0;title\x07\x1b[2Jplain\n'"
    name = served.quick("exec", box, "--shell", "-d", "-c", code).stdout.strip()
    said = served.quick("command", "logs", box, name, "-f").stdout
    assert "plain" in said
    assert "\x1b" not in said


def test_stats_are_a_table_or_a_document(served: Service, box: str) -> None:
    served.quick("exec", box, "-c", "1")
    table = served.quick("stats").stdout
    assert box in table
    assert "128" in table
    (told,) = json.loads(served.quick("stats", box, "--json").stdout)["sandboxes"]
    assert told["id"] == box
    assert told["kernels"] == 1
    assert told["memory"] > 0
    missing = served.quick("stats", "sandbox-nope", "--json")
    assert missing.returncode == 2
