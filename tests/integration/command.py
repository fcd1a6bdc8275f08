"""The command `sbx`: in this process, and as a process, as a shell would run it.

A process takes a second to import what a command needs, so only a test of signals, of terminals, of
exit codes as a shell sees them and of imports starts one.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from sbx.cli import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "sbx"]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would change the answers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SBX_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def in_process(
    *words: str | Path, stdin: bytes = b"", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command here, with descriptors 0, 1 and 2 of its own; `env` is all that it has of
    SBX_*. Descriptors, the environment, the current directory, signal handlers and handlers of the
    log are as before when it returns."""
    with ExitStack() as held:
        files = [held.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(stdin)
        files[0].seek(0)
        held.enter_context(_as_it_was())
        for name in [name for name in os.environ if name.startswith("SBX_")]:
            del os.environ[name]
        os.environ.update(env)
        if "TMPDIR" in env:
            tempfile.tempdir = None  # it is looked up again
        for fd, file in enumerate(files):
            os.dup2(file.fileno(), fd)
        streams = zip(("stdin", "stdout", "stderr"), files, "rww", strict=True)
        patch = held.enter_context(pytest.MonkeyPatch.context())
        for name, file, mode in streams:
            stream = held.enter_context(open(os.dup(file.fileno()), mode, encoding="utf-8"))
            patch.setattr(sys, name, stream)
        code = _outside_of_loops([str(word) for word in words])
        sys.stdout.flush()
        sys.stderr.flush()
        said = []
        for file in files[1:]:
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(list(words), code, *said)


def _outside_of_loops(words: list[str]) -> int:
    """Run it in this thread, as signal handlers need the main one; a coroutine of a test, which has
    a running loop around it, blocks until another thread has run it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return main(words)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(main, words).result()


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Put back, at the end, what a command may change in the process that runs it."""
    root = logging.getLogger()
    with ExitStack() as held:
        for fd in range(3):
            held.callback(_put_back, os.dup(fd), fd)
        held.callback(_put_environment_back, dict(os.environ))
        held.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        held.callback(os.chdir, os.getcwd())
        held.callback(_put_handlers_back, root, root.handlers[:], root.level)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
            held.callback(signal.signal, number, signal.getsignal(number))
        yield


def _put_back(kept: int, fd: int) -> None:
    os.dup2(kept, fd)
    os.close(kept)


def _put_environment_back(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _put_handlers_back(log: logging.Logger, handlers: list[logging.Handler], level: int) -> None:
    log.handlers[:] = handlers
    log.setLevel(level)


def sbx(
    *words: str | Path,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it as a process, to its end. stdin is empty unless given."""
    ended = subprocess.run(
        [*COMMAND, *map(str, words)],
        input=stdin or b"",
        capture_output=True,
        env=environment(**(env or {})),
        cwd=cwd,
        timeout=120,
        check=False,
    )
    return subprocess.CompletedProcess(
        ended.args, ended.returncode, ended.stdout.decode(), ended.stderr.decode()
    )


@contextmanager
def started(
    *words: str | Path,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.PIPE,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start it; whatever happens, it is gone at the end."""
    with subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment(**(env or {})),
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def family(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """It and everything it started: broker, bwrap, PID 1, kernel."""
    top = psutil.Process(process.pid)
    return [top, *top.children(recursive=True)]
