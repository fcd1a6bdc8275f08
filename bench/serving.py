"""A real `sbx serve` in a process of its own, for as long as a row needs it."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from bench.samples import NotMeasured
from sbx.client import Client
from sbx.errors import SbxError

_READY_S = 60.0
_ENDS_S = 30.0
_LIMITS = {
    "SBX_KERNELS_MAX": "200",
    "SBX_KERNELS_PER_OWNER": "200",
    "SBX_SANDBOXES_PER_OWNER": "500",
}


KEY = "sk-sbx-" + "b" * 64  # the operator's, on TCP


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory for the files of a service."""
    with tempfile.TemporaryDirectory(prefix="sbx-bench-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)  # as root it serves under another user
        yield Path(directory)


@asynccontextmanager
async def served(
    *,
    listen: str | None = None,
    console: str | None = None,
    top: Path | None = None,
    module: str = "sbx",
    **limits: str,
) -> AsyncIterator[Client]:
    """A client of it, over its Unix socket; with `listen` it is also on this address of TCP, where
    KEY opens it, and with `console` on that one, for browsers. `top` has its files, or else they go
    with it; `limits` are further variables, and `module` is its program. Raise NotMeasured if it
    does not come to serve."""
    with ExitStack() as stack:
        directory = str(top or stack.enter_context(temporary_directory()))
        socket = Path(directory, "run", "sbx.sock")
        words = ["serve", "--socket", str(socket), "--data-dir", str(Path(directory, "data"))]
        words += ["--listen", listen] if listen is not None else []
        words += ["--console", console] if console is not None else []
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *words,
            env={**os.environ, **_LIMITS, **limits, "SBX_LOG_LEVEL": "error", "SBX_API_KEY": KEY},
            cwd=directory,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with Client(socket) as client:
                await _ready(client, process)
                yield client
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _ENDS_S)
            except TimeoutError:
                process.kill()
                await process.wait()


def service_pid(top: Path) -> int:
    """Return the process of the service in this directory that answers requests."""
    found = [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if "serve" in (words := each.info["cmdline"] or ()) and str(top / "data") in words
    ]
    if len(found) != 1:
        raise NotMeasured(f"{len(found)} processes serve in {top}")
    return found[0]


async def _ready(client: Client, process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            while process.returncode is None:
                try:
                    await client.health()
                    return
                except SbxError:
                    await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    raise NotMeasured("sbx serve did not come to answer")
