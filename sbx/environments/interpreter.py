"""Which Python the kernels of a policy run, and which directories it does not run without."""

import asyncio
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from sbx.errors import PolicyError
from sbx.isolation.launch_plan import Interpreter

_ASK = (
    "import importlib.util, json, sys; "
    "print(json.dumps([importlib.util.find_spec('IPython') is not None, "
    "sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix]))"
)
_ASK_SECONDS = 20.0


@cache
def own_interpreter() -> Interpreter:
    """The environment of this very process."""
    return _interpreter(sys.executable, (sys.prefix, sys.base_prefix, sys.exec_prefix))


async def interpreter_at(path: str) -> Interpreter:
    """The environment of another Python on the host. Raises PolicyError when it does not answer."""
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            "-I",
            "-c",
            _ASK,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
        )
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                said, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        has_ipython, executable, *prefixes = json.loads(said)
    except (OSError, ValueError, TimeoutError) as error:
        raise PolicyError(
            f"the policy's interpreter {path} cannot be run: {error}",
            code="interpreter_unavailable",
            hint="name a Python executable that has ipykernel installed",
        ) from error
    if process.returncode != 0:
        raise PolicyError(
            f"the policy's interpreter {path} failed: {complaint.decode(errors='replace')[:200]}",
            code="interpreter_unavailable",
            hint="name a Python executable that has ipykernel installed",
        )
    if not has_ipython:
        raise PolicyError(
            f"the policy's interpreter {path} has no IPython, which is the kernel",
            code="interpreter_unavailable",
            hint=f"install it there: {path} -m pip install ipykernel",
        )
    return _interpreter(executable, tuple(prefixes))


def interpreter_as(path: str, uid: int, gid: int) -> Interpreter | None:
    """As `interpreter_at`, asked by root: the program runs as another user, whoever owns it. None
    when it does not answer. Blocks for 20 s at most."""
    try:
        said = subprocess.run(
            [path, "-I", "-c", _ASK],
            user=uid,
            group=gid,
            extra_groups=(),
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_SECONDS,
            check=True,
        ).stdout
        _, executable, *prefixes = json.loads(said)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return _interpreter(executable, tuple(prefixes))


def interpreter_of(executable: str, prefixes: tuple[str, ...]) -> Interpreter:
    """One of which these parts are known already: looks at links, and runs nothing."""
    return _interpreter(executable, prefixes)


def _interpreter(executable: str, prefixes: tuple[str, ...]) -> Interpreter:
    """The prefixes, and every link between the executable and the real one.

    Never the directory around a link: `~/python` is a link in a home, whose files nobody meant to
    show.
    """
    needed = list(prefixes)
    links: list[tuple[str, str]] = []
    link = executable
    for _ in range(40):  # linux gives up on a chain of links at 40, too: path_resolution(7)
        if not os.path.islink(link):
            needed.append(link)
            break
        links.append((link, os.readlink(link)))
        link = os.path.normpath(os.path.join(os.path.dirname(link), links[-1][1]))
    needed.append(os.path.realpath(prefixes[0]))
    shown = _outermost(needed)
    apart = (one for one in links if not any(Path(one[0]).is_relative_to(top) for top in shown))
    return Interpreter(executable, shown, tuple(apart))


def _outermost(directories: list[str]) -> tuple[str, ...]:
    """Without those that lie below another one; `/` itself is never shown."""
    unique = [Path(name) for name in dict.fromkeys(directories) if name not in ("", "/")]
    return tuple(
        str(one)
        for one in unique
        if not any(other != one and one.is_relative_to(other) for other in unique)
    )
