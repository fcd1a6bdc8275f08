"""One command of a creation: its output is bounded, it has a deadline, and leaves nothing.

It is the leader of a session of its own, so that whatever it started ends with it, and it inherits
the lock of the environment: should this process be killed, the name stays taken until it has ended.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sbx.aio import run_to_completion
from sbx.errors import Unavailable

_CHUNK = 1 << 16
_LINE_MAX = 2000
_LINES_KEPT = 200
_OUTPUT_MAX = 64 << 20
_UMASK = 0o022  # jails of a root runtime have other uids; see `hashes.make_readable`
_TOLD = 20
# What would send packages elsewhere than where they are meant to go, or change what is run.
_NOT_HANDED_ON = (
    "PIP_CONFIG_SETTINGS", "PIP_DRY_RUN", "PIP_EDITABLE", "PIP_PREFIX", "PIP_PYTHON", "PIP_REPORT",
    "PIP_REQUIREMENT", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_SRC", "PIP_TARGET", "PIP_USER",
    "UV_BREAK_SYSTEM_PACKAGES", "UV_PREFIX", "UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET",
    "VIRTUAL_ENV",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a command printed: `lines` the last of both streams, `out` stdout where it was kept."""

    code: int
    lines: tuple[str, ...]
    out: bytes = b""


@dataclass(slots=True)
class StepRunner:
    """The commands of one creation. `tell` hears each line as it comes; `until` is a time of the
    loop's clock; `inherited` are descriptors that each command keeps open."""

    tell: Callable[[str], None]
    until: float
    inherited: Sequence[int] = ()
    _told: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))

    async def run(self, *words: str, keep: bool = False) -> StepOutput:
        """Run it to its end. `keep`: all of stdout is wanted, and no line of it told.

        Raises Unavailable: `command_not_found`, `environment_timeout`, `output_too_long`.
        Cancelled, it ends the command first.
        """
        self._told.clear()
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(),
                cwd="/",
                umask=_UMASK,
                start_new_session=True,
                pass_fds=tuple(self.inherited),
            )
        except OSError as error:
            raise Unavailable(
                f"{words[0]} cannot be run: {error.strerror}",
                code="command_not_found",
                hint="choose another one with --python or --installer",
            ) from error
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout_at(self.until):
                out, _, code = await asyncio.gather(
                    self._kept(process.stdout) if keep else self._read(process.stdout),
                    self._read(process.stderr),
                    process.wait(),
                )
        except TimeoutError:
            raise Unavailable(
                f"{os.path.basename(words[0])} did not end in time",
                code="environment_timeout",
                hint="give it more with --timeout; what was downloaded is in its cache",
                details={"output": list(self._told)[-_TOLD:]},
            ) from None
        finally:
            await run_to_completion(_ended(process))
        return StepOutput(code, tuple(self._told), out)

    async def _kept(self, stream: asyncio.StreamReader) -> bytes:
        pieces, size = [], 0
        while piece := await stream.read(_CHUNK):
            pieces.append(piece)
            size += len(piece)
            if size > _OUTPUT_MAX:
                raise Unavailable("the installer prints without end", code="output_too_long")
        return b"".join(pieces)

    async def _read(self, stream: asyncio.StreamReader) -> bytes:
        held = b""
        while piece := await stream.read(_CHUNK):
            *whole, held = (held + piece).replace(b"\r", b"\n").split(b"\n")
            for line in whole:
                self._hear(line)
            held = held[-_LINE_MAX:]
        self._hear(held)
        return b""

    def _hear(self, line: bytes) -> None:
        if text := line[:_LINE_MAX].decode(errors="replace").rstrip():
            self._told.append(text)
            self.tell(text)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of its session. Once it was waited for its number may be another's."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment() -> dict[str, str]:
    """Ours: where packages come from is configured there. Not what steers Python, or would put
    packages elsewhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "SBX_")) and name not in _NOT_HANDED_ON
    }
    return {
        **kept,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "NO_COLOR": "1",
    }
