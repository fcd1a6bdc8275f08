"""The alternatives. Each opens a sandbox, and runs code in it until its output is complete."""

import asyncio
import json
import os
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import baseline, paths
from bench.peers.install import Installed, host_directories, oci_runtime, output_of
from bench.samples import NotMeasured
from sbx import Runtime

Run = Callable[[str], Awaitable[str]]

_BWRAP = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
    *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
)
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Subject:
    """`opened` yields the function that runs code in a new sandbox. `prepare` is not timed."""

    name: str
    walls: str
    keeps_state: bool
    opened: Callable[[], AbstractAsyncContextManager[Run]]
    prepare: Callable[[], Awaitable[object]] | None = None


async def subjects(installed: Installed, stack: AsyncExitStack) -> list[Subject]:
    """Return all of them; `stack` ends what they need. One that is not installed fails later."""
    runtime = await stack.enter_async_context(Runtime())
    await paths.zygote_started(runtime, paths.DATA_SCIENCE)
    settings = installed.directory / "srt.json"
    await asyncio.to_thread(settings.write_text, json.dumps(_srt_settings(installed.directory)))
    listed = [
        _sbx(runtime),
        Subject("ipykernel, by jupyter_client", "none", True, _ipykernel),
        Subject("bwrap and Python for each call", "namespaces", False, _each_call(_bwrap)),
        Subject(
            "@anthropic-ai/sandbox-runtime",
            "namespaces, seccomp, a network proxy",
            False,
            _each_call(lambda code: _srt(installed.srt, settings, code)),
        ),
        Subject(
            "llm-sandbox, bubblewrap",
            "namespaces, seccomp",
            False,
            _of_worker(await stack.enter_async_context(_worker(installed)), "llm-sandbox"),
        ),
        Subject(
            "smolagents, LocalPythonExecutor",
            "an interpreter of the syntax tree, in the same process",
            True,
            _of_worker(await stack.enter_async_context(_worker(installed)), "smolagents"),
        ),
    ]
    bundle = await asyncio.to_thread(_bundle, installed.directory / "bundle")
    runtime_name = oci_runtime()
    walls = "namespaces, cgroups, a root directory"
    opened = _container(runtime_name, bundle)
    return [*listed, Subject(f"{runtime_name} for each call", walls, False, opened)]


def _sbx(runtime: Runtime) -> Subject:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Run]:
        async with await runtime.create(paths.DATA_SCIENCE) as box:

            async def run(code: str) -> str:
                return (await box.run(code)).stdout

            yield run
            paths.came_by(box.receipt, "pool")

    walls = "namespaces, seccomp, Landlock, cgroups, a receipt"
    return Subject("sbx, a kernel of the pool", walls, True, opened, lambda: runtime.warm(
        paths.DATA_SCIENCE, new=True
    ))  # fmt: skip


@asynccontextmanager
async def _ipykernel() -> AsyncIterator[Run]:
    async with baseline.ipykernel() as kernel:

        async def run(code: str) -> str:
            texts = list[str]()

            def see(message: dict[str, Any]) -> None:
                if message["msg_type"] == "stream":
                    texts.append(message["content"]["text"])

            await kernel.execute(code, see)
            return "".join(texts)

        yield run


def _each_call(
    command: Callable[[str], Sequence[str]],
) -> Callable[[], AbstractAsyncContextManager[Run]]:
    """Return the sandbox that is nothing but this command, once for each call."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Run]:
        yield lambda code: output_of(command(code))

    return opened


def _bwrap(code: str) -> Sequence[str]:
    # A checkout may be below /tmp.
    binds = (word for path in host_directories() for word in ("--ro-bind", path, path))
    return (*_BWRAP, *binds, sys.executable, "-c", code)


def _srt(srt: Path, settings: Path, code: str) -> Sequence[str]:
    command = shlex.join((sys.executable, "-c", code))
    return (str(srt), "--settings", str(settings), "-c", command)


def _srt_settings(directory: Path) -> dict[str, Any]:
    return {
        "network": {"allowedDomains": [], "deniedDomains": []},
        "filesystem": {"denyRead": [], "allowWrite": [str(directory / "work")], "denyWrite": []},
    }


# -- Python libraries ------------------------------------------------------------------------------


@asynccontextmanager
async def _worker(
    installed: Installed,
) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[str]]]:
    """A process with the environment of the libraries. Yield the call of it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(str(installed.python), str(_WORKER)),
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    requests, replies = process.stdin, process.stdout
    assert replies is not None

    async def call(request: dict[str, Any]) -> str:
        requests.write(json.dumps(request).encode() + b"\n")
        if not (line := await replies.readline()):
            raise NotMeasured("the library failed")
        return str(json.loads(line)["output"])

    try:
        yield call
    finally:
        requests.close()
        process.kill()
        await process.wait()


def _of_worker(
    call: Callable[[dict[str, Any]], Awaitable[str]], name: str
) -> Callable[[], AbstractAsyncContextManager[Run]]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Run]:
        await call({"open": name})
        yield lambda code: call({"run": code})
        await call({"close": True})

    return opened


# -- OCI runtimes ----------------------------------------------------------------------------------


def _container(name: str, bundle: Path) -> Callable[[], AbstractAsyncContextManager[Run]]:
    """Return a container of crun(1) or runc(8) for each call."""

    async def run(code: str) -> str:
        config = _config([sys.executable, "-c", code])
        (bundle / "config.json").write_text(json.dumps(config))
        words = (name, "run", "--bundle", str(bundle), f"sbx-bench-{secrets.token_hex(6)}")
        return await output_of(words)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Run]:
        yield run

    return opened


def _bundle(directory: Path) -> Path:
    """Create a root directory that leads to the /usr of the host."""
    root = directory / "rootfs"
    for name in ("usr", "proc", "dev", "tmp", "etc", *(path[1:] for path in host_directories())):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc" / "ld.so.cache").touch()
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink() and not (root / name).is_symlink():
            (root / name).symlink_to(os.readlink(Path("/", name)))
    return directory


def _config(args: list[str]) -> dict[str, Any]:
    """Return the configuration of the OCI runtime specification."""
    read_only = ["rbind", "ro", "nosuid", "nodev"]
    binds = ("/usr", "/etc/ld.so.cache", *host_directories())
    return {
        "ociVersion": "1.0.2",
        "process": {
            "args": args,
            "cwd": "/tmp",
            "env": ["PATH=/usr/bin:/bin"],
            "user": {"uid": 0, "gid": 0},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
            *(
                {"destination": path, "type": "bind", "source": path, "options": read_only}
                for path in binds
            ),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]
        },
    }
