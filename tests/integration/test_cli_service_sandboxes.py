"""The commands on sandboxes of a running service: made, listed, kept, ended, and looked into."""

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, environment, in_process, started
from serving import Service


@pytest.fixture
def box(service: Service) -> Iterator[str]:
    made = service.quick("create")
    assert (made.returncode, made.stderr) == (0, "")
    yield made.stdout.strip()
    service.quick("rm", made.stdout.strip())


def json_of(ended: "subprocess.CompletedProcess[str]", code: int = 0) -> dict[str, Any]:
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


def test_create_prints_the_id_and_ps_lists_it(service: Service, box: str) -> None:
    assert re.fullmatch(r"sandbox-[0-9a-f]{12}", box)
    listed = service.quick("ps")
    row = next(line for line in listed.stdout.splitlines() if box in line)
    assert row.split()[:3] == [box, "idle", "default"]
    assert row.endswith("never")
    assert service.quick("ps", "--quiet").stdout.splitlines() == [box]
    (one,) = json_of(service.quick("ps", "--json"))["sandboxes"]
    assert one["id"] == box
    assert service.quick("ps", "--status", "ready", "-q").stdout == ""


def test_ps_without_sandboxes_says_how_to_make_one(service: Service) -> None:
    listed = service.quick("ps")
    assert (listed.returncode, listed.stdout) == (0, "")
    assert "sbx create" in listed.stderr
    assert json_of(service.quick("ps", "--json")) == {"sandboxes": []}


def test_create_takes_policy_ttl_env_and_what_is_narrower(service: Service) -> None:
    words = ["--policy", "python-default", "--ttl", "10min", "--env", "MODE=a=b"]
    made = json_of(service.quick("create", *words, "--narrow", "limits.memory_max=96MiB", "--json"))
    assert made["profile"] == "python-default"
    assert str(made["expires_at"]).endswith("Z")
    box = str(made["id"])
    seen = service.quick("exec", box, "-c", "import os; print(os.environ['MODE'])")
    assert seen.stdout == "a=b\n"
    too_much = service.quick("exec", box, "-c", "hoard = b'x' * (200 << 20)")
    assert too_much.returncode in (1, 137)  # MemoryError, or ended by the limit
    assert service.quick("rm", box).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--policy", "defualt"], 2, "defualt"),
        (["--ttl", "5 parsecs"], 2, "--ttl"),
        (["--ttl", "0"], 2, "--ttl"),
        (["--env", "MODE"], 2, "NAME=VALUE"),
        (["--narrow", "limits.memory_max"], 2, "KEY"),
        (["--narrow", "limits.memory_max=64GiB"], 2, "memory_max"),
        (["--workspace-id", "ws-000000000000"], 2, "ws-000000000000"),
    ],
)
def test_create_says_what_is_wrong(
    service: Service, words: list[str], code: int, said: str
) -> None:
    sentence = refusal(service.quick("create", *words), code)
    assert said.lower() in sentence.lower() or "limits.memory_max=256MiB" in sentence
    error = json_of(service.quick("create", "--json", *words), code)["error"]
    assert error["code"]


def test_stop_keeps_files_and_drops_variables(service: Service, box: str) -> None:
    service.quick("exec", box, "-c", "x = 1; open('kept.txt', 'w').write('here')")
    assert service.quick("ps", "--status", "ready", "-q").stdout.strip() == box
    assert service.quick("stop", box).stdout.strip() == box
    assert json_of(service.quick("stop", "--json", box)) == {"stopped": [box], "failed": []}
    after = service.quick("exec", box, "-c", "print('x' in globals(), open('kept.txt').read())")
    assert after.stdout == "False here\n"


def test_extend_counts_from_the_end_that_was(service: Service) -> None:
    box = service.quick("create", "--ttl", "60").stdout.strip()
    before = json_of(service.quick("ps", "--json"))["sandboxes"][0]["expires_at"]
    longer = service.quick("extend", box, "2h")
    assert re.fullmatch(rf"{box} lives until .*, in (2 h|12\d min)\n", longer.stdout)
    after = json_of(service.quick("extend", box, "10", "--json"))["expires_at"]
    assert str(after) > str(before)
    service.quick("rm", box)


def test_extend_is_refused_where_nothing_expires(service: Service, box: str) -> None:
    refusal(service.quick("extend", box, "60"), 3)
    error = json_of(service.quick("extend", box, "60", "--json"), 3)["error"]
    assert error["code"] == "sandbox_ttl_infinite"


def test_rm_takes_several_and_a_second_time_is_no_error(service: Service) -> None:
    boxes = [service.quick("create").stdout.strip() for _ in range(2)]
    assert service.quick("rm", *boxes).stdout.splitlines() == boxes
    assert json_of(service.quick("rm", "--json", boxes[0])) == {"removed": [boxes[0]], "failed": []}
    assert service.quick("ps", "-q").stdout == ""


def test_rm_goes_on_after_one_that_fails(service: Service, box: str) -> None:
    ended = service.quick("rm", "sandbox-000000000000", box)
    assert (ended.returncode, ended.stdout) == (2, f"{box}\n")
    assert ended.stderr.startswith("error: sandbox sandbox-000000000000 does not exist")
    failed = json_of(service.quick("rm", "--json", "sandbox-000000000000"), 2)["failed"]
    assert failed[0]["error"]["code"] == "not_found"


def test_rm_of_all_asks_and_refuses_where_nobody_can_be_asked(service: Service, box: str) -> None:
    assert "--yes" in refusal(service.quick("rm", "--all"), 2)
    assert service.quick("ps", "-q").stdout.strip() == box
    assert asked(service, b"n\n") == asked(service, b"\x04") == 2
    assert service.quick("ps", "-q").stdout.strip() == box
    assert asked(service, b"y\n") == 0
    assert service.quick("ps", "-q").stdout == ""
    assert json_of(service.quick("rm", "--all", "--yes", "--json")) == {"removed": [], "failed": []}
    refusal(service.quick("rm"), 2)
    refusal(service.quick("rm", "--all", box), 2)


def asked(service: Service, answer: bytes) -> int:
    """`rm --all` at a terminal where somebody answers; its exit code."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "rm", "--all"],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            env=environment(SBX_SOCKET=str(service.socket)),
        ) as process:
            said = b""
            while b"[y/N]" not in said:
                said += os.read(ours, 1024)
            os.write(ours, answer)
            return process.wait(60)
    finally:
        os.close(ours)
        os.close(theirs)


def test_inspect_has_the_receipt_and_the_pids_of_the_host(service: Service, box: str) -> None:
    idle = json_of(service.quick("inspect", "--json", box))
    assert (idle["sandbox"]["id"], idle["kernels"]) == (box, [])
    service.quick("exec", box, "-c", "1")
    (kernel,) = json_of(service.quick("inspect", "--json", box))["kernels"]
    assert kernel["receipt"]["landlock_abi"]
    assert len(kernel["host_pids"]) >= 2  # PID 1 of the jail, and the kernel
    assert all(os.path.exists(f"/proc/{pid}") for pid in kernel["host_pids"])
    shown = service.quick("inspect", box)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"^landlock +hard +ABI \d", shown.stdout, re.M)
    assert re.search(r"^changed +nothing", shown.stdout, re.M)


def test_history_lists_and_shows_and_takes_notes(service: Service, box: str) -> None:
    assert "nothing has run" in service.quick("history", box).stderr
    first = json_of(service.quick("exec", box, "--json", "-c", "print('first')"))["run_id"]
    second = service.quick("exec", box, "--json", "--shell", "-c", "echo no >&2; exit 3")
    rows = service.quick("history", box).stdout.splitlines()
    assert [row.split()[0] for row in rows[-2:]] == [json.loads(second.stdout)["run_id"], first]
    assert f"python {first} ok" in service.quick("history", box, first).stdout
    document = json_of(service.quick("history", box, "--json"))
    assert document["total"] == 2
    shell, python = document["entries"]
    assert (shell["exec_type"], shell["success"]) == ("shell", False)
    assert service.quick("history", box, "--ok").stdout.count("print('first')") == 1
    assert service.quick("history", box, "--kind", "shell").stdout.count("python") == 0
    assert service.quick("history", box, "--limit", "1").stderr.startswith("note: 1 more")

    noted = service.quick("history", box, python["id"], "--notes", "good", "--tags", "a,b")
    assert "notes: good" in noted.stdout
    assert "    first" in noted.stdout
    assert json_of(service.quick("history", box, "--tags", "b", "--json"))["total"] == 1
    assert json_of(service.quick("history", box, "last", "--json"))["id"] == shell["id"]
    refusal(service.quick("history", box, "run-000000000000"), 2)
    refusal(service.quick("history", box, "--notes", "of which?"), 2)


def test_logs_tell_events_and_runs_in_order(service: Service, box: str) -> None:
    service.quick("exec", box, "-c", r"print('hel\x1blo'); 1 / 0")
    service.quick("stop", box)
    shown = service.quick("logs", box)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert r"    hel\x1blo" in shown.stdout
    assert "ZeroDivisionError" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert shown.stdout.index("created") < shown.stdout.index("failed, ")
    assert shown.stdout.index("failed, ") < shown.stdout.rindex("stopped")
    lines = [json.loads(line) for line in service.quick("logs", "--json", box).stdout.splitlines()]
    assert {line["kind"] for line in lines} == {"event", "run"}
    refusal(service.quick("logs", "sandbox-000000000000"), 2)


def test_logs_follow_until_the_sandbox_is_deleted(service: Service) -> None:
    box = service.quick("create").stdout.strip()
    env = {"SBX_SOCKET": str(service.socket)}
    with started("logs", "--follow", "--json", box, env=env) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        assert b'"created"' in next(lines)
        service.quick("exec", box, "-c", "print('while it is followed')")
        assert next(line for line in lines if b"while it is followed" in line)
        service.quick("rm", box)
        assert process.wait(60) == 0


def test_logs_that_are_followed_end_with_ctrl_c(service: Service, box: str) -> None:
    with started("logs", "-f", box, env={"SBX_SOCKET": str(service.socket)}) as process:
        assert process.stdout is not None
        assert b"created" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


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
        ["mount", "ID", "/srv"],
        ["unmount", "ID", "/mnt/srv"],
        ["unfreeze", "ID"],
        ["forget", "USER", "--yes"],
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
    sentence = refusal(in_process(*words, "--connect", socket), 3)
    assert str(socket) in sentence
    assert "sbx serve" in sentence


def test_without_a_service_json_has_the_code_of_the_error(tmp_path: Path) -> None:
    ended = in_process("ps", "--json", SBX_SOCKET=str(tmp_path / "none.sock"))
    assert json_of(ended, 3)["error"]["code"] == "service_unreachable"


@pytest.mark.parametrize("name", ["", ".", "..", "../admin/keys", "a\nb", "sandbox-\u202e"])
def test_a_hostile_id_is_of_no_sandbox(service: Service, name: str) -> None:
    for words in (["stop", name], ["exec", name, "-c", "1"], ["inspect", name], ["unfreeze", name]):
        assert "\u202e" not in refusal(service.quick(*words), 2)


def test_a_wrong_key_is_refused_with_3(service: Service) -> None:
    assert "key" in refusal(service.quick("ps", "--key", "sk-sbx-" + "0" * 64), 3)
    error = json_of(service.quick("ps", "--json", SBX_KEY="sk-sbx-" + "0" * 64), 3)["error"]
    assert error["code"] == "unauthorized"


def test_ps_imports_nothing_heavy(service: Service) -> None:
    code = (
        "import sys\nfrom sbx.cli import main\nassert main(['ps']) == 0\n"
        "heavy = {'IPython', 'pandas', 'fastapi', 'uvicorn', 'httpx', 'sbx.runtime'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    ended = subprocess.run(
        [COMMAND[0], "-c", code],
        capture_output=True,
        env=environment(SBX_SOCKET=str(service.socket)),
        timeout=30,
        check=True,
    )
    assert ended.stdout.decode() == "[]\n"
