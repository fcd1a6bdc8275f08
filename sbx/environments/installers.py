"""pip and uv: which one there is, how it locks, and how it installs what was locked.

Neither is told where packages come from: each uses its own configuration. So that "what pip is
configured to use" holds, uv, which does not read pip's, is chosen by itself only where pip has no
word on that, or uv has one of its own.
"""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sbx.aio import in_thread
from sbx.environments.pythons import Python
from sbx.environments.requirements import LockFile, lock_text, locked, of_words
from sbx.environments.step_runner import StepOutput, StepRunner
from sbx.errors import Unavailable

Choice = Literal["auto", "pip", "uv"]
_OLDEST_PIP = Version("23.0")  # the first whose --report is stable; --python came with 22.3
_TOLD = 20
_REPORT_MAX = 64 << 20
# By what either is told where packages come from.
_SOURCES = (
    "index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "proxy", "cert",
    "client-cert",
)  # fmt: skip
_UV_SOURCES = (
    "UV_CONFIG_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX",
    "UV_INDEX_URL",
)  # fmt: skip


@dataclass(frozen=True)
class Installer:
    """`command` runs the installer. `build`: whether source distributions may be built.

    `lock` returns the text of requirements.lock, and `install` installs exactly these packages into
    the environment of `python`. Both raise Unavailable with the last lines of output in the details.
    """

    command: tuple[str, ...]
    version: str
    build: bool

    @property
    def text(self) -> str:
        return f"{type(self).__name__.lower()} {self.version}"

    async def lock(self, steps: StepRunner, python: Path, wanted: Path) -> str:
        raise NotImplementedError

    async def install(self, steps: StepRunner, python: Path, lock: Path) -> None:
        raise NotImplementedError


class Pip(Installer):
    async def lock(self, steps: StepRunner, python: Path, wanted: Path) -> str:
        report = wanted.with_name("report.json")
        said = await steps.run(
            *self._in(python),
            *("install", "--dry-run", "--ignore-installed", "--progress-bar", "off"),
            *("--report", str(report)),
            *_no_builds(self.build),
            *("-r", str(wanted)),
        )
        _check(said, "environment_unresolved", "the packages could not be resolved")
        try:
            return lock_text(_of_report(json.loads(await in_thread(_taken, report))))
        except (ValueError, KeyError, TypeError) as error:
            raise _unlockable(f"what pip reports cannot be read: {error}") from error

    async def install(self, steps: StepRunner, python: Path, lock: Path) -> None:
        said = await steps.run(
            *self._in(python),
            *("install", "--no-deps", "--require-hashes", "--progress-bar", "off"),
            *_no_builds(self.build),
            *("-r", str(lock)),
        )
        _check(said, "environment_not_installed", "the packages could not be installed")

    def _in(self, python: Path) -> tuple[str, ...]:
        return (*self.command, "--python", str(python), "--no-color")


class Uv(Installer):
    async def lock(self, steps: StepRunner, python: Path, wanted: Path) -> str:
        said = await steps.run(
            *self.command,
            *("pip", "compile", "--python", str(python), "--generate-hashes", "--no-annotate"),
            *("--no-header", "--no-emit-index-url", "--no-emit-find-links"),
            *_no_builds(self.build),
            str(wanted),
            keep=True,
        )
        _check(said, "environment_unresolved", "the packages could not be resolved")
        try:
            return lock_text(locked(said.out.decode()))
        except ValueError as error:
            raise _unlockable(f"there is no hash for {error}") from None

    async def install(self, steps: StepRunner, python: Path, lock: Path) -> None:
        said = await steps.run(
            *self.command,
            *("pip", "install", "--python", str(python), "--require-hashes", "--no-deps"),
            *("--link-mode", "copy"),  # no file is shared with its cache
            *_no_builds(self.build),
            *("-r", str(lock)),
        )
        _check(said, "environment_not_installed", "the packages could not be installed")
        # Not by uv itself, whose compiler loads the .pth files of what was just installed.
        library = python.parent.parent / "lib"
        await steps.run(str(python), "-I", "-S", "-m", "compileall", "-qq", str(library))


async def choose(choice: Choice, python: Python, steps: StepRunner, *, build: bool) -> Installer:
    """The installer that was asked for, or the one that there is. Raises Unavailable
    `installer_unavailable`."""
    uv = await _uv(steps, build) if choice != "pip" else None
    pip = _pip(python, build)
    if choice == "uv" or pip is None:
        found: Installer | None = uv
    elif choice == "pip" or uv is None:
        found = pip
    else:
        found = pip if await _only_pip_is_configured(pip, steps) else uv
    if found is not None:
        return found
    raise Unavailable(
        f"there is no {'pip or uv' if choice == 'auto' else choice} to install packages with",
        code="installer_unavailable",
        hint=f"install one: {python.executable} -m ensurepip, or put uv on PATH",
    )


def _pip(python: Python, build: bool) -> Pip | None:
    """That of the Python chosen, else that of our own environment."""
    if _is_new_enough(python.pip):
        return Pip((python.executable, "-I", "-m", "pip"), python.pip, build)
    if importlib.util.find_spec("pip") is not None:
        version = importlib.import_module("pip").__version__
        if _is_new_enough(version):
            return Pip((sys.executable, "-I", "-m", "pip"), version, build)
    return None


def _is_new_enough(version: str) -> bool:
    try:
        return Version(version) >= _OLDEST_PIP
    except InvalidVersion:
        return False


async def _uv(steps: StepRunner, build: bool) -> Uv | None:
    path = shutil.which("uv")
    if path is not None and path.startswith("/"):  # never one of the working directory
        command: tuple[str, ...] = (path,)
    elif importlib.util.find_spec("uv") is not None:
        command = (sys.executable, "-I", "-m", "uv")
    else:
        return None
    said = await steps.run(*command, "--version", keep=True)
    words = said.out.decode(errors="replace").split()
    return Uv(command, words[1], build) if said.code == 0 and len(words) > 1 else None


async def _only_pip_is_configured(pip: Pip, steps: StepRunner) -> bool:
    if any(os.environ.get(name) for name in _UV_SOURCES):
        return False
    said = await steps.run(*pip.command, "config", "list", keep=True)
    keys = [line.partition("=")[0] for line in said.out.decode(errors="replace").splitlines()]
    return any(key.rpartition(".")[2] in _SOURCES for key in keys)


def _no_builds(build: bool) -> tuple[str, ...]:
    return () if build else ("--only-binary", ":all:")


def _of_report(report: Any) -> list[LockFile]:
    """What `pip install --report` says would be installed."""
    found = []
    for one in report["install"]:
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        info = one["download_info"]
        hashes = info.get("archive_info", {}).get("hashes", {})
        strong = [kind for kind in ("sha256", "sha512", "sha384") if kind in hashes]
        if not strong:
            raise _unlockable(f"there is no hash for {name} {version}")
        direct = one.get("is_direct") is True
        text = f"{name} @ {info['url']}" if direct else f"{name}=={Version(version)}"
        of_words([text])  # metadata is whoever's made the package
        hashed = f"{strong[0]}:{hashes[strong[0]]}"
        found.append(LockFile(canonicalize_name(name), text, (hashed,)))
    return found


def _taken(report: Path) -> bytes:
    """What the file holds, which is gone then."""
    with report.open("rb") as file:
        data = file.read(_REPORT_MAX + 1)
    report.unlink()
    if len(data) > _REPORT_MAX:
        raise ValueError("it is too long")
    return data


def _check(said: StepOutput, code: str, message: str) -> None:
    if said.code == 0:
        return
    raise Unavailable(
        message, code=code, hint=_advice(said.lines), details={"output": _last(said.lines)}
    )


def _last(lines: Sequence[str]) -> list[str]:
    """The last that say something."""
    said = [line for line in lines if not line.startswith(("WARNING: Location", "[notice]"))]
    return said[-_TOLD:]


def _advice(lines: Sequence[str]) -> str:
    said = "\n".join(lines).lower()
    for words, hint in _ADVICE:
        if any(word in said for word in words):
            return hint
    return "the lines above are the installer's own"


_ADVICE = (
    (
        ("no matching distribution", "there is no version of", "not found in the package registry"),
        "check names and versions; without --build only wheels are taken, and a package may have "
        "none for this Python",
    ),
    (
        ("conflicting dependencies", "resolutionimpossible", "unsatisfiable"),
        "ask for fewer fixed versions, or others: they contradict each other",
    ),
    (
        ("name or service not known", "connection", "timed out", "dns error", "certificate"),
        "the index was not reached: look at `pip config list`, PIP_*, UV_* and proxies",
    ),
    (("no space left",), "free some space, or set SBX_ENVIRONMENTS to another place"),
)


def _unlockable(why: str) -> Unavailable:
    return Unavailable(
        f"the packages cannot be locked: {why}",
        code="environment_unresolved",
        hint="use an index that gives hashes, or another installer with --installer",
    )
