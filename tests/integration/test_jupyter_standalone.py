"""`python -I -m sbx.jupyter`: a kernel for clients that know no provisioner, as a real process."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import environment
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_specs import jupyter_kernels, person_s  # noqa: F401

PATIENCE_S = 60.0
PLANTED = ("json", "zmq", "sbx", "asyncio", "sitecustomize", "jupyter_client", "msgspec")


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def process(
    *words: str | Path, cwd: Path, safe: bool = True, **env: str
) -> Iterator["subprocess.Popen[str]"]:
    """Whatever happens, it is gone at the end."""
    command = [sys.executable, *(["-I"] if safe else []), "-m", "sbx.jupyter", *map(str, words)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()


@contextmanager
def client_of(file: Path) -> Iterator[BlockingKernelClient]:
    until(lambda: file.exists() and file.read_text().endswith("}"))
    client = BlockingKernelClient()
    client.load_connection_file(str(file))
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE_S)
        yield client
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)


def status(client: BlockingKernelClient, code: str) -> str:
    content = client.execute(code, reply=True, timeout=PATIENCE_S)["content"]
    return str(content.get("ename", content["status"]))


def test_it_serves_a_client_and_runs_no_file_that_lies_beside_the_notebook(
    own_temporary_directory: Path,
) -> None:
    """Code inside writes to that directory, and `python -m` would import from it first."""
    directory = own_temporary_directory / "planted"
    directory.mkdir()
    for name in PLANTED:
        (directory / f"{name}.py").write_text("open('ran', 'w'); raise SystemExit(9)\n")
    file = own_temporary_directory / "planted.json"
    words = ("--policy", "notebook", "-f", file)
    with process(*words, cwd=person_s(directory), JUPYTER_CONFIG_DIR="/none") as started:
        with client_of(file) as client:
            assert status(client, "open('made', 'w').write('inside')") == "ok"
        assert (directory / "made").read_text() == "inside"
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) == 0
    assert not (directory / "ran").exists()
    assert not file.exists()  # it was its own


def test_sigint_interrupts_a_dead_kernel_ends_it_and_a_client_s_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "kernel.json"
    file.write_text(json.dumps({"key": "of-the-client"}))
    with process("--policy", "default", "-f", file, cwd=tmp_path) as started:
        until(lambda: json.loads(file.read_text()).get("shell_port"))
        assert json.loads(file.read_text())["key"] == "of-the-client"
        with client_of(file) as client:
            asked = client.execute("import time\nprint('on')\ntime.sleep(600)")
            until(lambda: is_stream(client.get_iopub_msg(timeout=PATIENCE_S), asked))
            started.send_signal(signal.SIGINT)
            reply = client.get_shell_msg(timeout=PATIENCE_S)
            assert reply["content"]["ename"] == "KeyboardInterrupt"
            assert status(client, "1") == "ok"
            assert status(client, "import os; os._exit(1)") == "KernelDied"
        assert started.wait(PATIENCE_S) == 137
    assert file.exists()


def is_stream(message: dict[str, Any], asked: str) -> bool:
    return bool(message["msg_type"] == "stream" and message["parent_header"].get("msg_id") == asked)


@pytest.mark.full_tier
def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "kernel.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        words = ("--policy", "default", "-f", file)
        with process(*words, cwd=tmp_path, JPY_PARENT_PID=str(parent.pid)) as started:
            until(file.exists)
            below = psutil.Process(started.pid).children(recursive=True)
            assert below
            parent.kill()
            assert started.wait(PATIENCE_S) == 0
    until(lambda: not any(alive(one) for one in below))


def alive(one: psutil.Process) -> bool:
    try:
        return bool(one.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_what_is_wrong_is_one_sentence_and_a_hint(tmp_path: Path) -> None:
    words = ("--policy", "defualt", "-f", tmp_path / "kernel.json")
    with process(*words, cwd=tmp_path) as started:
        _, complaint = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 2
    assert "did you mean default?" in complaint
    assert [line.partition(":")[0] for line in complaint.splitlines()] == ["error", "hint"]


def test_without_its_option_it_does_not_start(tmp_path: Path) -> None:
    words = ("-f", tmp_path / "kernel.json")
    with process(*words, cwd=tmp_path, safe=False) as started:
        _, complaint = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 2
    assert "python -I" in complaint
