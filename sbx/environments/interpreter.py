"""The Python of the kernels of a policy, and the directories that it needs."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
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
    return interpreter_of(sys.executable, (sys.prefix, sys.base_prefix, sys.exec_prefix))


async def ask_python(
    path: str, question: str, *, env: Mapping[str, str] | None = None
) -> tuple[int, bytes, bytes]:
    """Run this code in another Python of the host. Return its exit code, stdout and stderr. Raise
    OSError, and TimeoutError after 20 s."""
    process = await asyncio.create_subprocess_exec(
        path,
        *("-I", "-c", question),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        cwd="/",
    )
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            output, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output, complaint


async def interpreter_at(path: str) -> Interpreter:
    """Return the environment of another Python on the host. Raise PolicyError if it does not
    run."""
    try:
        code, output, complaint = await ask_python(path, _ASK, env={})
        has_ipython, executable, *prefixes = json.loads(output)
    except (OSError, ValueError, TimeoutError) as error:
        raise PolicyError(
            f"the policy's interpreter {path} cannot be run: {error}",
            code="interpreter_unavailable",
            hint="name a Python executable that has ipykernel installed",
        ) from error
    if code != 0:
        raise PolicyError(
            f"the policy's interpreter {path} failed: {complaint.decode(errors='replace')[:200]}",
            code="interpreter_unavailable",
            hint="name a Python executable that has ipykernel installed",
        )
    if not has_ipython:
        raise PolicyError(
            f"the policy's interpreter {path} has no IPython, which the kernel needs",
            code="interpreter_unavailable",
            hint=f"install it there: {path} -m pip install ipykernel",
        )
    return interpreter_of(executable, tuple(prefixes))


def interpreter_as(path: str, uid: int, gid: int) -> Interpreter | None:
    """Like `interpreter_at`, for root: run the program as another user. Return None if it fails.
    Block for 20 s at most."""
    try:
        output = subprocess.run(
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
        _, executable, *prefixes = json.loads(output)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return interpreter_of(executable, tuple(prefixes))


def interpreter_of(executable: str, prefixes: tuple[str, ...]) -> Interpreter:
    """Return an interpreter with the prefixes and every link between the executable and the real
    one. Run nothing.

    The directory around a link is never visible: `~/python` is a link in a home directory, whose
    files are private.
    """
    needed = list(prefixes)
    links: list[tuple[str, str]] = []
    link = executable
    for _ in range(40):  # Linux follows 40 links at most, too: path_resolution(7)
        if not os.path.islink(link):
            needed.append(link)
            break
        links.append((link, os.readlink(link)))
        link = os.path.normpath(os.path.join(os.path.dirname(link), links[-1][1]))
    needed.append(os.path.realpath(prefixes[0]))
    shown = _outermost(needed)
    apart = (pair for pair in links if not any(Path(pair[0]).is_relative_to(top) for top in shown))
    return Interpreter(executable, shown, tuple(apart))


def _outermost(directories: list[str]) -> tuple[str, ...]:
    """Return the directories that are not below another one. `/` itself is never visible."""
    unique = [Path(name) for name in dict.fromkeys(directories) if name not in ("", "/")]
    return tuple(
        str(path)
        for path in unique
        if not any(other != path and path.is_relative_to(other) for other in unique)
    )
