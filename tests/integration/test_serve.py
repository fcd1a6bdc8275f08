"""`sbx serve` as a process: start, activation, who may connect, drain, start after a crash."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from command import in_process, sbx
from places import short_directory
from service_process import Service, service, wait_until

from sbx.cli.serve import unit

_COLD = {"SBX_FAST_PATH": "false"}  # no pool: nothing here is about how fast a kernel starts
# What systemd does: the socket as fd 3, and the variables with the pid of the process itself.
_ACTIVATED = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3, inheritable=True); "
    "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'}; "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


@pytest.fixture
def top() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def create(client: httpx.Client) -> str:
    made = client.post("/v1/sandboxes", json={})
    assert made.status_code == 201, made.text
    sandbox_id: str = made.json()["id"]
    return sandbox_id


def python(client: httpx.Client, sandbox_id: str, code: str) -> dict[str, Any]:
    done = client.post(f"/v1/sandboxes/{sandbox_id}/python/exec", json={"code": code})
    assert done.status_code == 200, done.text
    reply: dict[str, Any] = done.json()
    return reply


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


class Running(threading.Thread):
    """A run asked for beside the test; `reply` is what came of it."""

    def __init__(self, served: Service, sandbox_id: str, code: str) -> None:
        super().__init__()
        self._given = served, sandbox_id, code
        self.reply: dict[str, Any] | None = None
        self.start()

    def run(self) -> None:
        served, sandbox_id, code = self._given
        try:
            with served.client() as client:
                self.reply = python(client, sandbox_id, code)
        except httpx.HTTPError:
            return


def begun(served: Service, sandbox_id: str, name: str) -> bool:
    """Whether the code has made a file of this name: then its run goes on."""
    with served.client() as client:
        listed = client.get(f"/v1/sandboxes/{sandbox_id}/filesystem/directories")
        return name in {entry["name"] for entry in listed.json().get("entries", ())}


def wait_for_run(served: Service, sandbox_id: str, name: str) -> None:
    deadline = time.monotonic() + 60
    while not begun(served, sandbox_id, name):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served() -> Iterator[Service]:
    """One service for what leaves it as it was."""
    with (
        short_directory() as top,
        service(top, "--listen", "127.0.0.1:0", env=_COLD, executed=True) as served,
    ):
        yield served
        assert served.stop() == 0
        assert not served.socket.exists()
        assert os.listdir(served.data / "removed") == []


def test_a_first_start_shows_the_key_once_and_keeps_it_private(served: Service) -> None:
    key = re.findall(r"first key: (sk-sbx-[0-9a-f]{64})", served.log)[0]
    assert served.log.count(key) == 1
    assert mode(served.data / "credentials.json") == 0o600
    assert (mode(served.socket.parent), mode(served.socket)) == (0o700, 0o600)
    shown = json.loads(next(line for line in served.log.splitlines() if '"listening on' in line))
    address = f"{shown['event'].split()[-1]}/v1/sandboxes"
    assert httpx.get(address).status_code == 401
    assert httpx.get(address, headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.core
@pytest.mark.unprivileged
def test_whoever_owns_the_socket_runs_code_and_sees_the_metrics(served: Service) -> None:
    with served.client() as client:
        sandbox_id = create(client)
        reply = python(client, sandbox_id, "open('made', 'w').write('x'); 6 * 7")
        assert (reply["success"], reply["output"].strip()) == (True, "42")
        url = f"/v1/sandboxes/{sandbox_id}/filesystem/files"
        assert client.get(url, params={"path": "made"}).json() == {"content": "x"}
        assert client.delete(url, params={"path": "made"}).status_code == 200
        metrics = client.get("/metrics").text
        assert client.delete(f"/v1/sandboxes/{sandbox_id}").status_code == 204
    assert 'sbx_acquire_seconds_count{path="cold"} 1.0' in metrics
    assert "sbx_run_seconds_count" in metrics
    assert 'sbx_kernels{policy="default"} 1.0' in metrics
    assert "sbx_kernels_idle 0.0" in metrics


@pytest.mark.needs("root")
def test_as_root_the_process_that_parses_http_is_another_user(served: Service) -> None:
    status = Path(f"/proc/{served.pid}/status").read_text()
    assert "Uid:\t1899999999\t1899999999\t1899999999\t1899999999\n" in status
    assert re.search(r"CapEff:\t0*b\n", status)
    assert re.search(r"CapBnd:\t0*\n", status)
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    threads = psutil.Process(served.pid).threads()
    for thread in threads:
        of_thread = Path(f"/proc/{served.pid}/task/{thread.id}/status").read_text()
        assert re.search(r"CapEff:\t0*b\n", of_thread)
    broker, *_ = psutil.Process(served.pid).children()
    assert broker.uids().real == 0


def test_a_second_service_at_the_same_place_is_refused(served: Service) -> None:
    with short_directory() as other:
        at_the_socket = sbx("serve", "--socket", served.socket, "--data-dir", other / "data")
        assert at_the_socket.returncode == 3
        assert "answers at" in at_the_socket.stderr
        over_the_data = sbx(
            "serve", "--socket", other / "run" / "sbx.sock", "--data-dir", served.data
        )
        assert over_the_data.returncode == 3
        assert "another runtime uses the data directory" in over_the_data.stderr
        assert not (other / "run" / "sbx.sock").exists()
    with served.client() as client:
        assert client.get("/health").status_code == 200


def test_sigterm_lets_a_run_end_and_refuses_new_ones(top: Path) -> None:
    with service(top, env=_COLD) as served:
        with served.client() as client:
            sandbox_id = create(client)
        code = "open('begun', 'w').close(); import time; time.sleep(2); print('whole')"
        running = Running(served, sandbox_id, code)
        wait_for_run(served, sandbox_id, "begun")
        assert served.stop() == 0
        running.join()
        assert running.reply is not None
        assert running.reply["output"].strip() == "whole"
    with service(top, env=_COLD) as again, again.client() as client:
        assert client.get(f"/v1/sandboxes/{sandbox_id}").json()["status"] == "idle"
        [entry] = client.get(f"/v1/sandboxes/{sandbox_id}/history").json()["entries"]
        assert entry["success"]


def test_a_run_that_does_not_end_is_cut_off_and_recorded(top: Path) -> None:
    with service(top, "--drain-timeout", "0.5", env=_COLD) as served:
        with served.client() as client:
            sandbox_id = create(client)
        running = Running(
            served, sandbox_id, "open('begun', 'w').close(); import time; time.sleep(100)"
        )
        wait_for_run(served, sandbox_id, "begun")
        assert served.stop() == 0
        running.join()
        assert running.reply is not None
        assert not running.reply["success"]
        assert "the service ended" in running.reply["error"]
    with service(top, env=_COLD) as again, again.client() as client:
        [entry] = client.get(f"/v1/sandboxes/{sandbox_id}/history").json()["entries"]
        assert not entry["success"]
        assert "open('begun'" in entry["code"]


@pytest.mark.full_tier
def test_a_second_signal_ends_the_drain(top: Path) -> None:
    with service(top, "--drain-timeout", "600", env=_COLD) as served:
        with served.client() as client:
            sandbox_id = create(client)
        running = Running(
            served, sandbox_id, "open('begun', 'w').close(); import time; time.sleep(100)"
        )
        wait_for_run(served, sandbox_id, "begun")
        served.process.send_signal(signal.SIGINT)
        draining = "draining, for 600 s at most"
        wait_until(lambda: draining in served.log, served.process, served.log_path)
        assert served.stop() == 0
        running.join()
        assert running.reply is not None
        assert "the service ended" in running.reply["error"]  # and not its time-out


@pytest.mark.full_tier
def test_a_drain_does_not_wait_for_who_only_follows(top: Path) -> None:
    with service(top, "--drain-timeout", "600", env=_COLD) as served, served.client() as client:
        url = f"/v1/sandboxes/{create(client)}/events"
        with client.stream("GET", url, headers={"accept": "text/event-stream"}) as followed:
            first = next(followed.iter_raw())
            assert first.startswith(b"id: ")
            assert served.stop() == 0


@pytest.mark.full_tier
@pytest.mark.core
def test_after_kill_9_it_starts_again_with_its_files_and_without_leftovers(top: Path) -> None:
    with service(top, env=_COLD) as served:
        with served.client() as client:
            sandbox_id = create(client)
            python(client, sandbox_id, "open('kept', 'w').write('x')")
        Running(served, sandbox_id, "open('begun', 'w').close(); import time; time.sleep(60)").join(
            0
        )
        wait_for_run(served, sandbox_id, "begun")
        served.kill()
        assert served.socket.exists()
    with service(top, env=_COLD) as again, again.client() as client:
        assert client.get(f"/v1/sandboxes/{sandbox_id}").json()["status"] == "idle"
        kept = client.get(f"/v1/sandboxes/{sandbox_id}/filesystem/files", params={"path": "kept"})
        assert kept.json() == {"content": "x"}
        assert python(client, sandbox_id, "1")["success"]


@pytest.mark.needs("root")
def test_another_user_is_let_in_by_group_or_key_only(top: Path) -> None:
    script = (
        "import os, socket, sys\n"
        "os.setgroups([int(sys.argv[2])]); os.setgid(4242); os.setuid(4242)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(b'GET /v1/sandboxes HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n')\n"
        "print(s.recv(99).split()[1].decode())"
    )

    def said(group: int) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, str(top / "run" / "sbx.sock"), str(group)],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    key = "of-the-environment-0123456789abcdef"
    opened = ("--socket-group", "54321", "--socket-mode", "0660")
    with service(top, *opened, env={**_COLD, "BAY_API_KEY": key}) as served:
        assert said(54321) == "200"
        assert "Permission denied" in said(4242)
        with served.client(key) as client:
            assert client.get("/v1/sandboxes").status_code == 200
        with served.client("wrong") as client:
            assert client.get("/v1/sandboxes").status_code == 401
        assert key not in served.log
        assert "first key" not in served.log


def test_systemd_hands_over_the_socket_and_is_told(top: Path) -> None:
    (top / "run").mkdir(mode=0o700)
    path = top / "run" / "sbx.sock"
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
    ):
        listening.bind(str(path))
        listening.listen()
        systemd.bind(str(top / "notify"))
        systemd.settimeout(60)
        launcher = [sys.executable, "-c", _ACTIVATED, str(listening.fileno())]
        env = {**_COLD, "NOTIFY_SOCKET": str(top / "notify"), "INVOCATION_ID": "x"}
        with service(top, env=env, launcher=launcher, pass_fds=[listening.fileno()]) as served:
            assert systemd.recv(200) == f"READY=1\nSTATUS=listening on {path}".encode()
            assert "sk-sbx-" not in served.log  # a journal is read by others
            with served.client() as client:
                assert client.get("/v1/sandboxes").status_code == 200
            assert served.stop() == 0
            assert systemd.recv(200).startswith(b"STOPPING=1")
        assert path.exists()  # systemd's, to be used again


@pytest.mark.parametrize("kind", ["system", "user", "socket"])
def test_units_are_for_this_very_sbx(kind: str) -> None:
    text = unit(kind)
    assert "@SBX@" not in text
    if kind != "socket":
        assert f"ExecStart={sys.executable} -I -m sbx serve\n" in text
        assert "\nDelegate=yes\n" in text
        assert "\nType=notify\n" in text


def test_a_unit_is_printed_and_nothing_served() -> None:
    printed = in_process("serve", "--print-unit", "system")
    assert (printed.returncode, printed.stdout) == (0, unit("system"))
    assert in_process("serve", "--print-unit", "x").returncode == 2


def test_config_shows_every_setting_and_its_source(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(top)
    (top / "sbx.toml").write_text("queue_max = 3\n")
    shown = in_process("config", "--json", SBX_API_KEY="secret-0123456789abcdef")
    found = {one["name"]: one for one in json.loads(shown.stdout)["settings"]}
    assert found["queue_max"] == {
        "name": "queue_max",
        "value": 3,
        "source": str(top / "sbx.toml"),
    }
    assert found["api_key"]["value"] == "(hidden)"
    assert found["socket"]["source"] == "default"
    assert "secret-" not in shown.stdout + in_process("config").stdout


def test_a_wrong_setting_ends_with_2_and_names_its_source(top: Path) -> None:
    for command in ("serve", "config"):
        ended = sbx(command, env={"SBX_QUEUE_MAX": "many"}, cwd=top)
        assert ended.returncode == 2
        assert "queue_max of the environment (SBX_QUEUE_MAX) is wrong" in ended.stderr


@pytest.mark.parametrize("words", [("serve",), ("config",)])
@pytest.mark.parametrize("name", [".env", "sbx.toml"])
def test_a_planted_settings_file_executes_nothing(
    top: Path, name: str, words: tuple[str, ...]
) -> None:
    """Code in `sbx run --workspace .` wrote SBX_BWRAP into .env; `sbx serve` there executed it."""
    program = top / "planted"
    program.write_text(f'#!/bin/sh\necho >> {top}/executed\nexec bwrap "$@"\n')
    program.chmod(0o755)
    line = f"SBX_BWRAP={program}" if name == ".env" else f'bwrap = "{program}"'
    (top / name).write_text(f"{line}\n")
    own = {"SBX_DATA_DIR": str(top / "data"), "SBX_SOCKET": str(top / "sbx.sock")}
    ended = sbx(*words, env=own, cwd=top)
    assert not (top / "executed").exists()
    assert ended.returncode != 0
    assert f"{top / name} may not set" in ended.stderr
    assert "--config" in ended.stderr


@pytest.mark.full_tier
def test_it_ends_with_its_broker_and_serves_again_when_it_is_started_anew(top: Path) -> None:
    with service(top, env=_COLD) as served, served.client() as client:
        sandbox_id = create(client)
        python(client, sandbox_id, "open('kept', 'w').close()")
        (broker,) = (
            one
            for one in psutil.Process(served.pid).children()
            if "sbx.isolation.broker.server" in " ".join(one.cmdline())
        )
        broker.kill()
        assert served.process.wait(60) == 70
        assert "the broker died" in served.log
    with service(top, env=_COLD) as served:
        assert begun(served, sandbox_id, "kept")
