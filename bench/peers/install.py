"""Install the alternatives: Python libraries, an npm package, and programs from Debian."""

import asyncio
import os
import shutil
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiofiles.os

from bench.samples import NotMeasured

_PIP = ("smolagents", "llm-sandbox", "pandas")
_NPM = ("@anthropic-ai/sandbox-runtime",)
_APT = {"socat": "socat", "rg": "ripgrep", "npm": "npm"}
_INSTALL_S = 900.0
_OUTPUT_MAX = 500  # characters of an error


@dataclass(frozen=True, slots=True)
class Installed:
    """The directory of the alternatives. Calls of `python` and `srt` may fail: see `problems`, the
    reason by the name of a package."""

    directory: Path
    problems: dict[str, str]

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    @property
    def srt(self) -> Path:
        return self.directory / "node_modules" / ".bin" / "srt"


def oci_runtime() -> str:
    """Return crun, or runc on a host whose cgroups crun 1.8 of Debian 12 refuses."""
    return "crun" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "runc"


def cache_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "sbx-bench", "peers")


async def install(directory: Path, show: Callable[[str], object]) -> Installed:
    """Install what is missing. A package that cannot be installed is a problem, not an error."""
    await aiofiles.os.makedirs(directory, exist_ok=True)
    done = Installed(directory, {})
    programs = {**_APT, oci_runtime(): oci_runtime()}
    if missing := [
        package for command, package in programs.items() if shutil.which(command) is None
    ]:
        show(f"installing {', '.join(missing)}")
        await _try(done, missing, ("apt-get", "install", "-y", "-q", *missing))
    if not done.python.exists():
        show(f"installing {', '.join(_PIP)}")
        await asyncio.to_thread(venv.create, directory / "venv", with_pip=True)
    await _try(done, _PIP, (str(done.python), "-m", "pip", "install", "-q", *_PIP))
    if not done.srt.exists():
        show(f"installing {', '.join(_NPM)}")
        words = ("npm", "install", "--no-audit", "--no-fund", "--prefix", str(directory), *_NPM)
        await _try(done, _NPM, words)
    return done


async def _try(done: Installed, packages: Sequence[str], command: Sequence[str]) -> None:
    try:
        await output_of(command, _INSTALL_S)
    except NotMeasured as error:
        done.problems.update(dict.fromkeys(packages, str(error)))


async def output_of(command: Sequence[str], seconds: float = 60.0, data: bytes = b"") -> str:
    """Return the output of a command. Raise NotMeasured if it fails, or takes too long."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise NotMeasured(f"{command[0]}: {error}") from None
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(data)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise NotMeasured(f"{command[0]} took more than {seconds:g} s") from None
    if process.returncode != 0:
        text = (errors or output).decode(errors="replace").strip()[-_OUTPUT_MAX:]
        raise NotMeasured(f"{command[0]} ended with {process.returncode}: {text}")
    return output.decode()


def host_directories() -> list[str]:
    """Return the directories that the Python of the bench needs below the root of a sandbox."""
    prefixes = (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1]))
    return list(dict.fromkeys(prefix for prefix in prefixes if not prefix.startswith("/usr")))
