"""The Pythons of this host: on PATH, in the directories of pyenv and uv, or named by a path."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from platformdirs import user_data_path

from sbx.environments.interpreter import ask_python
from sbx.errors import BadRequest, Unavailable

OLDEST = (3, 11)  # as in pyproject.toml
_ASK = """
import importlib.util, json, sys, sysconfig
pip, package = "", ""
if importlib.util.find_spec("pip"):
    import pip
    pip, package = pip.__version__, pip.__path__[0]
base = getattr(sys, "_base_executable", None) or sys.executable
free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
venv = importlib.util.find_spec("venv") is not None
version = list(sys.version_info[:3])
print(json.dumps([sys.implementation.name, version, base, free, venv, pip, package]))
"""
_AT_ONCE = 4
_MOST = 100
_VERSION = re.compile(r"\d+(\.\d+){0,2}")
_NAMED = re.compile(r"(?:/versions/|/cpython-|/python)(3\.\d+(?:\.\d+)?)[^/]*(?:/bin/python3?)?$")
_NAME = re.compile(r"python(3(\.\d+)?)?")


class Python(Struct, frozen=True, order=True):
    """A working Python. `executable` is not in a virtual environment. `pip` is its version or "",
    and `pip_package` its directory."""

    version: tuple[int, int, int]
    executable: str
    implementation: str
    free_threaded: bool
    has_venv: bool
    pip: str
    pip_package: str = ""

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def unfit(self) -> str | None:
        """Return the reason why it cannot have environments; None if it can."""
        if self.version < OLDEST:
            return f"kernels need {OLDEST[0]}.{OLDEST[1]} or later"
        if self.implementation != "cpython":
            return f"kernels need CPython, and it is {self.implementation}"
        if self.free_threaded:
            return "kernels need a build with the global interpreter lock"
        return None if self.has_venv else "it has no module venv"


async def find(request: str | None) -> Python:
    """Return the newest Python of this host for a path, `3.12`, `3.12.1` or `python3.12`; for None,
    the Python that runs sbx.

    Raise BadRequest `python_unsupported`, Unavailable `python_unavailable`.
    """
    if request is None:
        return _fit(await _named(sys.executable))
    if "/" in request:
        return _fit(await _named(str(Path(request).expanduser().absolute())))  # noqa: ASYNC240  # reads nothing
    version = request.removeprefix("python")
    if not _VERSION.fullmatch(version):
        raise BadRequest(
            f"{request!a} is not a version or a path of Python",
            code="python_unsupported",
            hint="a version as in 3.12, or the path of an executable",
        )
    parts = tuple(map(int, version.split(".")))
    if parts < OLDEST[: len(parts)]:
        raise _unsupported(f"Python {version} is too old: kernels need 3.11 or later")
    pythons = await every(os.environ, parts)
    suited = [python for python in pythons if python.version[: len(parts)] == parts]
    if not suited:
        pythons = await every(os.environ)
        there = ", ".join(dict.fromkeys(python.text for python in pythons if python.unfit is None))
        raise Unavailable(
            f"this host has no Python {version}",
            code="python_unavailable",
            hint=f"it has {there or 'no other'}; install it, or name one by its path",
        )
    return next((python for python in suited if python.unfit is None), None) or _fit(suited[0])


async def every(environment: Mapping[str, str], version: tuple[int, ...] = ()) -> list[Python]:
    """Return all working Pythons, newest first. Skip those whose path names another version than
    `version`."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def ask(path: str) -> Python | None:
        async with room:
            return await _probe(path)

    paths = dict.fromkeys([sys.executable, *_candidates(environment)])
    candidates = [path for path in paths if _may_be(path, version)][:_MOST]
    return _distinct(
        python for python in await asyncio.gather(*map(ask, candidates)) if python is not None
    )


def _may_be(path: str, version: tuple[int, ...]) -> bool:
    """Return whether the path, such as versions/3.12.1/bin/python3, names no other version."""
    named = _NAMED.search(path)
    numbers = [int(number) for number in named[1].split(".")] if named else []
    return all(number == other for number, other in zip(numbers, version, strict=False))


def _distinct(answers: Iterable[Python]) -> list[Python]:
    by_path: dict[str, Python] = {}
    for python in answers:
        by_path.setdefault(os.path.realpath(python.executable), python)
    return sorted(by_path.values(), reverse=True)


def _candidates(environment: Mapping[str, str]) -> Iterator[str]:
    for directory in os.get_exec_path(dict(environment)):
        if os.path.isabs(directory):
            yield from _pythons_in(Path(directory))
    homes = [Path(environment.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"]
    homes.append(Path(environment.get("UV_PYTHON_INSTALL_DIR") or user_data_path("uv") / "python"))
    for home in homes:
        with suppress(OSError):
            for name in sorted(os.listdir(home)):
                if os.access(path := home / name / "bin" / "python3", os.X_OK):
                    yield str(path)


def _pythons_in(directory: Path) -> Iterable[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    paths = (str(directory / name) for name in names if _NAME.fullmatch(name))
    return [path for path in paths if os.access(path, os.X_OK)]


async def _named(path: str) -> Python:
    if (python := await _probe(path)) is None:
        raise Unavailable(
            f"{path} is not a working Python",
            code="python_unavailable",
            hint="`sbx env pythons` lists the working ones",
        )
    return python


async def _probe(path: str) -> Python | None:
    try:
        _, output, _ = await ask_python(path, _ASK)
        implementation, version, base, free, has_venv, pip, package = json.loads(output)
        numbers = (int(version[0]), int(version[1]), int(version[2]))
        texts = str(pip), str(package)
        return Python(numbers, str(base), implementation, free, has_venv, *texts)
    except (OSError, TimeoutError, ValueError, IndexError, TypeError):
        return None


def _fit(python: Python) -> Python:
    if (why := python.unfit) is not None:
        raise _unsupported(f"Python {python.text} ({python.executable}) cannot be used: {why}")
    return python


def _unsupported(message: str) -> BadRequest:
    return BadRequest(
        message, code="python_unsupported", hint="`sbx env pythons` lists those of this host"
    )
