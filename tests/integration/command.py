"""The command `sbx` as a process, as a shell would run it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "sbx"]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would change the answers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SBX_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def sbx(
    *words: str | Path,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. stdin is empty unless given."""
    ended = subprocess.run(
        [*COMMAND, *map(str, words)],
        input=stdin or b"",
        capture_output=True,
        env=environment(**(env or {})),
        cwd=cwd,
        timeout=60,
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
