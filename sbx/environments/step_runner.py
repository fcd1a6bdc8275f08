"""Run one command of a creation, with bounded output and a deadline, and leave no process behind.

The command leads a separate session, so that all its processes end with it. It inherits the lock of
the environment: if this process is killed, the name stays locked until the command has ended.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct, field

from sbx.aio import run_to_completion
from sbx.errors import Unavailable

_CHUNK = 1 << 16
_LINE_MAX = 2000
_LINES_KEPT = 200
_OUTPUT_MAX = 64 << 20
_LINES_REPORTED = 20
# These would install packages at another place, or run another command.
_NOT_HANDED_ON = (
    "PIP_CONFIG_SETTINGS", "PIP_DRY_RUN", "PIP_EDITABLE", "PIP_PREFIX", "PIP_PYTHON", "PIP_REPORT",
    "PIP_REQUIREMENT", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_SRC", "PIP_TARGET", "PIP_USER",
    "UV_BREAK_SYSTEM_PACKAGES", "UV_PREFIX", "UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET",
    "VIRTUAL_ENV",
)  # fmt: skip


class StepOutput(Struct, frozen=True):
    """The output of a command: the last `lines` of both streams; `out` is stdout, if requested."""

    code: int
    lines: tuple[str, ...]
    out: bytes = b""


class StepRunner(Struct):
    """The commands of one creation. `on_line` gets each line of output. `until` is a time of the
    loop's clock. Each command inherits the descriptors `inherited`."""

    on_line: Callable[[str], None]
    until: float
    inherited: Sequence[int] = ()
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))

    async def run(self, *words: str, keep: bool = False) -> StepOutput:
        """Run a command to its end. `keep`: return the whole stdout, and report no line of it.

        Raise Unavailable: `command_not_found`, `environment_timeout`, `output_too_long`. A
        cancellation kills the command first.
        """
        self._lines.clear()
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(),
                cwd="/",
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
                hint="use a larger --timeout; the finished downloads are in its cache",
                details={"output": list(self._lines)[-_LINES_REPORTED:]},
            ) from None
        finally:
            await run_to_completion(_ended(process))
        return StepOutput(code, tuple(self._lines), out)

    async def _kept(self, stream: asyncio.StreamReader) -> bytes:
        pieces, size = [], 0
        while piece := await stream.read(_CHUNK):
            pieces.append(piece)
            size += len(piece)
            if size > _OUTPUT_MAX:
                raise Unavailable("the installer prints too much", code="output_too_long")
        return b"".join(pieces)

    async def _read(self, stream: asyncio.StreamReader) -> bytes:
        rest = b""
        while piece := await stream.read(_CHUNK):
            *whole, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            for line in whole:
                self._add_line(line)
            rest = rest[-_LINE_MAX:]
        self._add_line(rest)
        return b""

    def _add_line(self, line: bytes) -> None:
        if text := line[:_LINE_MAX].decode(errors="replace").rstrip():
            self._lines.append(text)
            self.on_line(text)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill the rest of its session. After a wait its number may belong to another process."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment() -> dict[str, str]:
    """Return our environment, which configures the package sources. Leave out variables that
    configure Python or another install location."""
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
