"""The commands on sandboxes of a running service: made, listed, kept, ended, and looked into."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, environment, started
from serving import Service, in_process, service


@pytest.fixture(scope="module")
def served() -> Iterator[Service]:
    with service() as running:
        yield running


@pytest.fixture
def box(served: Service) -> Iterator[str]:
    made = served.quick("create")
    assert (made.returncode, made.stderr) == (0, "")
    yield made.stdout.strip()
    served.quick("rm", made.stdout.strip())


def told(ended: "subprocess.CompletedProcess[str]", code: int = 0) -> dict[str, Any]:
    """The one JSON document; nothing on stderr."""
    assert (ended.returncode, ended.stderr) == (code, ""), ended
    assert ended.stdout.isascii()
    value = json.loads(ended.stdout)
    assert isinstance(value, dict)
    return value


def refusal(ended: "subprocess.CompletedProcess[str]", code: int) -> str:
    """The sentence, and with it the hint; nothing on stdout, and no traceback."""
    assert (ended.returncode, ended.stdout) == (code, ""), ended
    first, *more = ended.stderr.splitlines()
    assert first.startswith("error: ")
    assert all(line.startswith("hint: ") for line in more)
    return ended.stderr


def test_create_prints_the_id_and_ps_lists_it(served: Service, box: str) -> None:
    assert re.fullmatch(r"sandbox-[0-9a-f]{12}", box)
    listed = served.quick("ps")
    row = next(line for line in listed.stdout.splitlines() if box in line)
    assert row.split()[:3] == [box, "idle", "default"]
    assert row.endswith("never")
    assert served.quick("ps", "--quiet").stdout.splitlines() == [box]
    (one,) = told(served.quick("ps", "--json"))["sandboxes"]
    assert one["id"] == box
    assert served.quick("ps", "--status", "ready", "-q").stdout == ""


def test_ps_without_sandboxes_says_how_to_make_one(served: Service) -> None:
    listed = served.quick("ps")
    assert (listed.returncode, listed.stdout) == (0, "")
    assert "sbx create" in listed.stderr
    assert told(served.quick("ps", "--json")) == {"sandboxes": []}


def test_create_takes_policy_ttl_env_and_what_is_narrower(served: Service) -> None:
    words = ["--policy", "python-default", "--ttl", "10min", "--env", "MODE=a=b"]
    made = told(served.quick("create", *words, "--narrow", "limits.memory_max=96MiB", "--json"))
    assert made["profile"] == "python-default"
    assert str(made["expires_at"]).endswith("Z")
    box = str(made["id"])
    seen = served.quick("exec", box, "-c", "import os; print(os.environ['MODE'])")
    assert seen.stdout == "a=b\n"
    too_much = served.quick("exec", box, "-c", "hoard = b'x' * (200 << 20)")
    assert too_much.returncode in (1, 137)  # MemoryError, or ended by the limit
    assert served.quick("rm", box).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--policy", "defualt"], 2, "defualt"),
        (["--ttl", "5 parsecs"], 2, "--ttl"),
        (["--ttl", "0"], 2, "--ttl"),
        (["--env", "MODE"], 2, "NAME=VALUE"),
        (["--narrow", "limits.memory_max"], 2, "KEY"),
        (["--narrow", "limits.memory_max=64GiB"], 2, "memory_max"),
        (["--cargo", "ws-000000000000"], 2, "ws-000000000000"),
    ],
)
def test_create_says_what_is_wrong(served: Service, words: list[str], code: int, said: str) -> None:
    sentence = refusal(served.quick("create", *words), code)
    assert said.lower() in sentence.lower() or "limits.memory_max=256MiB" in sentence
    error = told(served.quick("create", "--json", *words), code)["error"]
    assert error["code"]


def test_stop_keeps_files_and_drops_variables(served: Service, box: str) -> None:
    served.quick("exec", box, "-c", "x = 1; open('kept.txt', 'w').write('here')")
    assert served.quick("ps", "--status", "ready", "-q").stdout.strip() == box
    assert served.quick("stop", box).stdout.strip() == box
    assert told(served.quick("stop", "--json", box)) == {"stopped": [box], "failed": []}
    after = served.quick("exec", box, "-c", "print('x' in globals(), open('kept.txt').read())")
    assert after.stdout == "False here\n"


def test_extend_counts_from_the_end_that_was(served: Service) -> None:
    box = served.quick("create", "--ttl", "60").stdout.strip()
    before = told(served.quick("ps", "--json"))["sandboxes"][0]["expires_at"]
    longer = served.quick("extend", box, "2h")
    assert re.fullmatch(rf"{box} lives until .*, in (2 h|12\d min)\n", longer.stdout)
    after = told(served.quick("extend", box, "10", "--json"))["expires_at"]
    assert str(after) > str(before)
    served.quick("rm", box)


def test_extend_is_refused_where_nothing_expires(served: Service, box: str) -> None:
    refusal(served.quick("extend", box, "60"), 3)
    error = told(served.quick("extend", box, "60", "--json"), 3)["error"]
    assert error["code"] == "sandbox_ttl_infinite"


def test_an_expired_sandbox_is_refused_with_3(served: Service) -> None:
    box = served.quick("create", "--ttl", "1").stdout.strip()
    deadline = time.monotonic() + 10
    while (ended := served.quick("exec", box, "-c", "1")).returncode == 0:
        assert time.monotonic() < deadline
    assert "expired" in refusal(ended, 3)
    served.quick("rm", box)


def test_rm_takes_several_and_a_second_time_is_no_error(served: Service) -> None:
    boxes = [served.quick("create").stdout.strip() for _ in range(2)]
    assert served.quick("rm", *boxes).stdout.splitlines() == boxes
    assert told(served.quick("rm", "--json", boxes[0])) == {"removed": [boxes[0]], "failed": []}
    assert served.quick("ps", "-q").stdout == ""


def test_rm_goes_on_after_one_that_fails(served: Service, box: str) -> None:
    ended = served.quick("rm", "sandbox-000000000000", box)
    assert (ended.returncode, ended.stdout) == (2, f"{box}\n")
    assert ended.stderr.startswith("error: sandbox-000000000000: ")
    failed = told(served.quick("rm", "--json", "sandbox-000000000000"), 2)["failed"]
    assert failed[0]["error"]["code"] == "not_found"


def test_rm_of_all_asks_and_refuses_where_nobody_can_be_asked(served: Service, box: str) -> None:
    assert "--yes" in refusal(served.quick("rm", "--all"), 2)
    assert served.quick("ps", "-q").stdout.strip() == box
    assert asked(served, b"n\n") == asked(served, b"\x04") == 2
    assert served.quick("ps", "-q").stdout.strip() == box
    assert asked(served, b"y\n") == 0
    assert served.quick("ps", "-q").stdout == ""
    assert told(served.quick("rm", "--all", "--yes", "--json")) == {"removed": [], "failed": []}
    refusal(served.quick("rm"), 2)
    refusal(served.quick("rm", "--all", box), 2)


def asked(served: Service, answer: bytes) -> int:
    """`rm --all` at a terminal where somebody answers; its exit code."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "rm", "--all"],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            env=environment(SBX_SOCKET=str(served.socket)),
        ) as process:
            said = b""
            while b"[y/N]" not in said:
                said += os.read(ours, 1024)
            os.write(ours, answer)
            return process.wait(60)
    finally:
        os.close(ours)
        os.close(theirs)


def test_inspect_has_the_receipt_and_the_pids_of_the_host(served: Service, box: str) -> None:
    idle = told(served.quick("inspect", "--json", box))
    assert (idle["sandbox"]["id"], idle["kernels"]) == (box, [])
    served.quick("exec", box, "-c", "1")
    (kernel,) = told(served.quick("inspect", "--json", box))["kernels"]
    assert kernel["receipt"]["landlock_abi"]
    assert len(kernel["host_pids"]) >= 2  # PID 1 of the jail, and the kernel
    assert all(os.path.exists(f"/proc/{pid}") for pid in kernel["host_pids"])
    shown = served.quick("inspect", box)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"^landlock +hard +ABI \d", shown.stdout, re.M)
    assert re.search(r"^changed +nothing", shown.stdout, re.M)


def test_history_lists_and_shows_and_takes_notes(served: Service, box: str) -> None:
    assert "nothing has run" in served.quick("history", box).stderr
    served.quick("exec", box, "-c", "print('first')")
    served.quick("exec", box, "--shell", "-c", "echo no >&2; exit 3")
    rows = served.quick("history", box).stdout.splitlines()
    assert [row.split()[0] for row in rows[-2:]] != []
    document = told(served.quick("history", box, "--json"))
    assert document["total"] == 2
    shell, python = document["entries"]
    assert (shell["exec_type"], shell["success"]) == ("shell", False)
    assert served.quick("history", box, "--ok").stdout.count("print('first')") == 1
    assert served.quick("history", box, "--kind", "shell").stdout.count("python") == 0
    assert served.quick("history", box, "--limit", "1").stderr.startswith("note: 1 more")

    noted = served.quick("history", box, python["id"], "--notes", "good", "--tags", "a,b")
    assert "notes: good" in noted.stdout
    assert "    first" in noted.stdout
    assert told(served.quick("history", box, "--tags", "b", "--json"))["total"] == 1
    assert told(served.quick("history", box, "last", "--json"))["id"] == shell["id"]
    refusal(served.quick("history", box, "exec-000000000000"), 2)
    refusal(served.quick("history", box, "--notes", "of which?"), 2)


def test_logs_tell_events_and_runs_in_order(served: Service, box: str) -> None:
    served.quick("exec", box, "-c", r"print('hel\x1blo'); 1 / 0")
    served.quick("stop", box)
    shown = served.quick("logs", box)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert r"    hel\x1blo" in shown.stdout
    assert "ZeroDivisionError" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert shown.stdout.index("created") < shown.stdout.index("failed, ")
    assert shown.stdout.index("failed, ") < shown.stdout.rindex("stopped")
    lines = [json.loads(line) for line in served.quick("logs", "--json", box).stdout.splitlines()]
    assert {line["kind"] for line in lines} == {"event", "run"}
    refusal(served.quick("logs", "sandbox-000000000000"), 2)


def test_logs_follow_until_the_sandbox_is_deleted(served: Service) -> None:
    box = served.quick("create").stdout.strip()
    env = {"SBX_SOCKET": str(served.socket)}
    with started("logs", "--follow", "--json", box, env=env) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        assert b'"created"' in next(lines)
        served.quick("exec", box, "-c", "print('while it is followed')")
        assert next(line for line in lines if b"while it is followed" in line)
        served.quick("rm", box)
        assert process.wait(60) == 0


def test_logs_that_are_followed_end_with_ctrl_c(served: Service, box: str) -> None:
    with started("logs", "-f", box, env={"SBX_SOCKET": str(served.socket)}) as process:
        assert process.stdout is not None
        assert b"created" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize(
    "words",
    [
        ["ps"],
        ["create"],
        ["exec", "ID", "-c", "1"],
        ["cp", "ID:a", "b"],
        ["logs", "ID"],
        ["history", "ID"],
        ["inspect", "ID"],
        ["stop", "ID"],
        ["rm", "ID"],
        ["extend", "ID", "60"],
        ["attach", "ID", "/srv"],
        ["detach", "ID", "/mnt/srv"],
        ["lift", "ID"],
        ["key", "list"],
        ["token", "list"],
        ["gc"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_without_a_service_each_command_names_the_socket_and_sbx_serve(
    words: list[str], tmp_path: Path
) -> None:
    socket = tmp_path / "none.sock"
    sentence = refusal(in_process(*words, "--socket", socket), 3)
    assert str(socket) in sentence
    assert "sbx serve" in sentence
    error = told(in_process(*words, "--json", SBX_SOCKET=str(socket)), 3)["error"]
    assert error["code"] == "service_unreachable"


@pytest.mark.parametrize("name", ["", ".", "..", "../admin/keys", "a\nb", "sandbox-\u202e"])
def test_a_hostile_id_is_of_no_sandbox(served: Service, name: str) -> None:
    for words in (["stop", name], ["exec", name, "-c", "1"], ["inspect", name], ["lift", name]):
        assert "\u202e" not in refusal(served.quick(*words), 2)


def test_a_wrong_key_is_refused_with_3(served: Service) -> None:
    assert "key" in refusal(served.quick("ps", "--key", "sk-sbx-" + "0" * 64), 3)
    error = told(served.quick("ps", "--json", SBX_KEY="sk-sbx-" + "0" * 64), 3)["error"]
    assert error["code"] == "unauthorized"


def test_ps_imports_nothing_heavy(served: Service) -> None:
    code = (
        "import sys\nfrom sbx.cli import main\nassert main(['ps']) == 0\n"
        "heavy = {'IPython', 'pandas', 'fastapi', 'uvicorn', 'httpx', 'sbx.runtime'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    ended = subprocess.run(
        [COMMAND[0], "-c", code],
        capture_output=True,
        env=environment(SBX_SOCKET=str(served.socket)),
        timeout=30,
        check=True,
    )
    assert ended.stdout.decode() == "[]\n"
