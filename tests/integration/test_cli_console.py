"""`sbx console`: a link, a local port, and a service of its own if none runs."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from places import short_directory
from serving import Service

from tests.tiers import rows


@contextmanager
def running(
    *words: str,
    command: Sequence[str] = (sys.executable, "-m", "sbx"),
    cwd: Path | None = None,
    **env: str,
) -> Iterator["subprocess.Popen[str]"]:
    """The command, until the end of the test."""
    with subprocess.Popen(
        [*command, "console", *words],
        env={**os.environ, **env},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def opened(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The JSON document of the command."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        try:
            return dict(json.loads(text))
        except ValueError:
            continue
    raise AssertionError(process.stderr and process.stderr.read())


def ask(origin: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """One request of a browser; the name needs no resolver."""
    host = origin.partition("://")[2]
    connection = http.client.HTTPConnection("127.0.0.1", int(host.rpartition(":")[2]), timeout=30)
    sent = {"Host": host, "Origin": origin, "X-Sbx-Console": "1"} | headers
    content = None if body is None else json.dumps(body)
    if content is not None:
        sent["Content-Type"] = "application/json"
    connection.request(method, path, content, sent)
    reply = connection.getresponse()
    text = reply.read()
    cookie = (reply.getheader("set-cookie") or "").partition(";")[0]
    connection.close()
    return reply.status, (text, cookie)


def test_the_link_logs_in_through_the_local_port(service: Service) -> None:
    with running("--json", SBX_SOCKET=str(service.socket)) as process:
        shown = opened(process)
        assert shown["url"].startswith(f"{shown['origin']}/console/#login=")
        status, (page, _) = ask(shown["origin"], "GET", "/console/")
        assert (status, b"<title>sbx</title>" in page) == (200, True)
        code = shown["url"].partition("#login=")[2]
        status, (me, cookie) = ask(shown["origin"], "POST", "/api/v1/console/login", {"code": code})
        assert status == 200, me
        assert json.loads(me)["owner"] == f"uid:{os.geteuid()}"
        status, (boxes, _) = ask(shown["origin"], "GET", "/v1/sandboxes", Cookie=cookie)
        assert (status, "items" in json.loads(boxes)) == (200, True)
        status, _ = ask(shown["origin"], "GET", "/v1/sandboxes")
        assert status == 401  # the port itself is nobody
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    with socket.socket() as probe:
        port = int(shown["origin"].rpartition(":")[2])
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_print_writes_the_link_only(service: Service) -> None:
    words = ("--print", "--path", "/console/settings", "--no-operator")
    with running(*words, SBX_SOCKET=str(service.socket)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "/console/settings#login=" in line
        code = line.strip().partition("#login=")[2]
        origin = line.partition("/console/")[0]
        _, (me, _) = ask(origin, "POST", "/api/v1/console/login", {"code": code})
        assert json.loads(me)["operator"] is False
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143


def test_a_name_that_the_console_does_not_have_is_refused(service: Service) -> None:
    ended = service.quick("console", "--print", "--host", "evil.example")
    assert ended.returncode == 2
    assert "127.0.0.1" in ended.stderr


def test_without_a_service_it_starts_one_and_ends_it() -> None:
    with short_directory() as directory:
        place = directory / "own" / "sbx.sock"
        data = str(directory / "data")
        with running("--json", SBX_SOCKET=str(place), SBX_DATA_DIR=data) as process:
            shown = opened(process)
            assert place.with_name("console.sock").exists()
            status, _ = ask(shown["origin"], "GET", "/console/")
            assert status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert process.stderr is not None
            assert "starting one" in process.stderr.read()
        assert not place.exists()
        assert not Path(f"{place.parent}/console.sock").exists()


def test_the_doctor_names_a_missing_listener(service: Service, tmp_path: Path) -> None:
    def doctor(at: Path, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sbx", "doctor", *words]
        env = {**os.environ, "SBX_SOCKET": str(at)}
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=100, check=False
        )

    assert json.loads(doctor(service.socket, "--json").stdout)["console"] == "found"
    alone = tmp_path / "sbx.sock"  # no console.sock is next to it
    alone.symlink_to(service.socket)
    assert "has no listener for browsers" in doctor(alone).stderr


@pytest.mark.parametrize(
    "planted",
    rows(["sbx/__init__.py", "msgspec.py", "sitecustomize.py"], ci_tier=["sbx/__init__.py"]),
)
def test_a_service_that_it_starts_imports_nothing_of_the_working_directory(planted: str) -> None:
    """`python -m sbx` in a workspace imported the package `sbx` that code inside had planted there,
    outside of each sandbox; so did an empty entry of PYTHONPATH. (holes 1.2)"""
    with short_directory() as directory:
        workspace = directory / "workspace"
        module = workspace / planted
        module.parent.mkdir(parents=True)
        if planted.startswith("sbx/"):
            (workspace / "sbx/__main__.py").touch()
        module.write_text(f"open({str(directory / 'ran')!r}, 'w')\n")
        (workspace / ".env").write_text("BASE_URL=http://127.0.0.1:9/v1\nMODEL_NAME=x\n")
        env = {"SBX_SOCKET": "../own/sbx.sock", "SBX_DATA_DIR": "../data", "PYTHONPATH": ""}
        command = [sys.executable, "-I", "-m", "sbx"]  # the installed `sbx` does not import from it
        with running("--json", command=command, cwd=workspace, **env) as process:
            opened(process)
            assert (directory / "own" / "sbx.sock").exists()
            assert (directory / "data").is_dir()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert process.stderr is not None
            notes = process.stderr.read()
        assert ".env of this directory does not set BASE_URL, MODEL_NAME" in notes
        assert "--env-file .env" in notes
        assert not (directory / "ran").exists()


def test_no_browser_is_taken_from_the_working_directory(service: Service) -> None:
    """With a relative entry in PATH, `webbrowser` starts a program of the working directory."""
    with short_directory() as directory:
        browser = directory / "www-browser"
        browser.write_text(f"#!/bin/sh\ntouch {directory}/ran\n")
        browser.chmod(0o755)
        env = {"SBX_SOCKET": str(service.socket), "PATH": f".:{os.environ['PATH']}", "DISPLAY": ""}
        command = [sys.executable, "-I", "-m", "sbx"]
        with running(command=command, cwd=directory, **env) as process:
            assert process.stdout is not None
            assert "#login=" in process.stdout.readline()
            assert process.stderr is not None
            while "Enter" not in process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert not (directory / "ran").exists()
