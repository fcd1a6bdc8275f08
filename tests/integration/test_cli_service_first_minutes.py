"""A person's first ten minutes with the service, in the order of the README."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, environment, in_process
from serving import Service, open_directory, service


def curl(served: Service, *words: str) -> str:
    ended = subprocess.run(
        ["curl", "-sS", "--max-time", "30", "--unix-socket", str(served.socket), *words],
        capture_output=True,
        check=True,
        timeout=40,
    )
    return ended.stdout.decode()


def test_a_persons_first_ten_minutes(tmp_path: Path) -> None:
    socket = tmp_path / "not-yet.sock"
    first = in_process("ps", "--connect", socket)  # before anything is started
    assert first.returncode == 3
    assert "sbx serve" in first.stderr

    with service() as served:
        assert "first key: sk-sbx-" in served.log.read_text()
        assert "listening on" in served.log.read_text()
        assert json.loads(curl(served, "http://sbx/health"))["status"] == "ok"

        # by hand
        asked = ["-H", "content-type: application/json", "-d", "{}"]
        box = json.loads(curl(served, "-X", "POST", "http://sbx/v1/sandboxes", *asked))["id"]
        code = json.dumps({"code": "x = 6; print('hello'); x * 7"})
        ran = curl(
            served,
            *("-H", "content-type: application/json", "-d", code),
            f"http://sbx/v1/sandboxes/{box}/python/exec",
        )
        assert json.loads(ran)["output"] == "hello\n42\n"
        wrong = json.loads(curl(served, "http://sbx/v1/sandboxes/no-such-one"))
        assert wrong["error"]["code"] == "not_found"

        # with the commands, in the same sandbox
        assert box in served.quick("ps").stdout
        assert served.quick("exec", box, "-c", "x + 1").stdout == "7\n"
        (tmp_path / "data.csv").write_text("a,b\n1,2\n")
        assert served.quick("cp", tmp_path / "data.csv", f"{box}:uploads/temparea/").returncode == 0
        make = "open('out.txt', 'w').write(open('uploads/temparea/data.csv').read().upper())"
        assert served.quick("exec", box, "-c", make).returncode == 0
        assert served.quick("cp", f"{box}:out.txt", tmp_path).returncode == 0
        assert (tmp_path / "out.txt").read_text() == "A,B\n1,2\n"
        refused = served.quick("exec", box, "-c", "open('/etc/shadow')")
        assert refused.returncode == 1
        assert "FileNotFoundError" in refused.stderr
        assert served.quick("stop", box).returncode == 0
        assert served.quick("exec", box, "--shell", "-c", "ls out.txt").stdout == "out.txt\n"
        assert "open('/etc/shadow')" in served.quick("history", box).stdout
        assert "requested" in served.quick("logs", box).stdout

        # somebody else's program, with a key of its own
        key = served.quick("key", "create", "--owner", "bot").stdout.strip()
        assert served.quick("ps", "-q", SBX_KEY=key).stdout == ""
        python = (
            "from sbx import Sandbox\n"
            f"with Sandbox(connect={str(served.socket)!r}) as box: print(box.run('1 + 1').result)"
        )
        ended = subprocess.run(
            [COMMAND[0], "-c", python],
            capture_output=True,
            env=environment(SBX_API_KEY=key),
            timeout=60,
            check=False,
        )
        assert ended.stdout.decode() == "2\n", ended.stderr.decode()

        assert served.quick("rm", box).stdout == f"{box}\n"
        assert served.quick("ps", "-q").stdout == ""
        assert in_process("audit", "verify", "--data-dir", served.data).returncode == 0


@pytest.mark.full_tier
def test_a_sandbox_is_there_after_a_restart(tmp_path: Path) -> None:
    """What a person finds who restarts the service, or the machine."""
    with open_directory() as top:
        with service(top=top) as served:
            box = served.quick("create").stdout.strip()
            served.quick("exec", box, "-c", "open('kept.txt', 'w').write('here'); x = 1")
        assert in_process("ps", "--connect", served.socket).returncode == 3
        assert not os.path.exists(served.socket)
        with service(top=top) as served:
            assert served.quick("ps", "--status", "idle", "-q").stdout.strip() == box
            look = "print(open('kept.txt').read(), 'x' in globals())"
            assert served.quick("exec", box, "-c", look).stdout == "here False\n"
            assert served.quick("history", box, "--json").stdout.count("exec-") >= 2
