"""What an agent holds in a project with the sandbox off: the host itself, as the user who runs sbx.

No wall stands around anything here. The operator has to allow it (`allow_host_mode`). It is refused
to a service that gave up root's rights, whose account is nobody's. Root gets it in directories of
root only, and only where the setting `project_owners` names root. What is kept
of a sandbox is the manner: every run is bounded in time and output and has one result, and what a
box started ends with it, as far as it stayed in its process group (host_process.py).
"""

import asyncio
import logging
import secrets
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from sbx import errors
from sbx.agent.sandbox import ToolUploads
from sbx.aio import in_thread, run_to_completion
from sbx.kernels import frames
from sbx.policy.model import LimitsPolicy
from sbx.protocol.files import Upload
from sbx.protocol.languages import check_language
from sbx.protocol.runs import Run, RunError, Status
from sbx.runtime.run import checks, termination
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.termination import GracefulTermination, StopReason
from sbx.service.projects.host_files import HostFiles
from sbx.service.projects.host_process import printing
from sbx.service.projects.host_python import HostPython
from sbx.workspace import check_name

_OUTPUT_MAX = 16 << 20
_TIMEOUT_S = 120.0
_TIMEOUT_MAX_S = 3600.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Going:
    """How a run that has begun is stopped."""

    ladder: GracefulTermination
    kill: Callable[[], None]
    killing: asyncio.TimerHandle | None = None


class HostSession:
    """See the module. Its methods may be called concurrently from one event loop."""

    sandboxed = False
    commands_allowed = True

    def __init__(
        self,
        directory: Path,
        uploads: ToolUploads | None,
        grace_s: float,
        *,
        lost: bool = False,
    ) -> None:
        """`uploads`: those of a kept conversation; None: put into a directory that goes with the
        box. `grace_s`: between an interrupt and the kill. `lost`: variables of an earlier box."""
        self._directory = directory
        self._grace_s = grace_s
        self._python = HostPython(directory, grace_s, lost=lost)
        self._files = HostFiles(directory)
        self._own = ExtraFiles()
        self._uploads: ToolUploads = uploads if uploads is not None else self._own
        self._tasks: dict[ActiveRun, asyncio.Task[None]] = {}
        self._going: dict[ActiveRun, _Going] = {}
        self._closed = False

    @property
    def files(self) -> HostFiles:
        return self._files

    @property
    def uploads(self) -> ToolUploads:
        return self._uploads

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    @property
    def stateful(self) -> bool:
        """Whether Python has, or had, variables that would be missed."""
        return self._python.stateful

    async def allow_commands(self) -> None:
        """They are."""

    # -- runs -----------------------------------------------------------------------------------

    def start_run(self, code: str, *, timeout: float | None = None) -> ActiveRun:
        """A cell of Python, which keeps its variables for the next. Raises BadRequest
        `invalid_code`, `invalid_timeout`, TooLarge, Closed."""
        checks.check_text(code, "code")
        timeout_s = _checked(timeout)
        return self._launch(lambda live: self._python.run(live, code, timeout_s, self._stoppable))

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ActiveRun:
        """`/bin/bash -c command`; `cwd` begins at the working directory. Raises as `start_run`."""
        checks.check_command(command)
        directory = self._directory / (cwd or ".")
        return self._program(["/bin/bash", "-c", "--", command], directory, _checked(timeout))

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> ActiveRun:
        """A script of bash; other languages are commands here. Raises as `start_run`, and
        BadRequest `unknown_language`, `language_unavailable`."""
        if check_language(language) != "bash":
            raise errors.BadRequest(
                f"without a sandbox there is no {language} but what the host has",
                code="language_unavailable",
                hint="write the code to a file, and run it by a command",
            )
        return self.start_shell(code, timeout=timeout)

    async def give_up(self, run: ActiveRun, /) -> None:
        """Nobody waits for this run any more: interrupt it, and kill it where that is ignored."""
        going, task = self._going.get(run), self._tasks.get(run)
        if going is not None:
            loop = asyncio.get_running_loop()
            going.killing = going.killing or loop.call_later(self._grace_s + 0.1, going.kill)
            await going.ladder.stop(StopReason.CALLER)
        elif task is not None and not run.begun and not run.done:
            run.finish(Status.INTERRUPTED)
            task.cancel()

    # -- beside -----------------------------------------------------------------------------------

    async def save_result(self, name: str, content: bytes) -> str:
        """Keep what is too long to be told, until the box is closed; the path by which to read it.
        Nothing of it is written into the working directory."""
        return (await self._own.put_bytes(name, content)).path

    async def close(self) -> None:
        """End what runs, and everything that was started."""
        self._closed = True
        await run_to_completion(self._end())

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            try:
                await self._python.close()
            finally:
                await self._own.close()

    # -- one run --------------------------------------------------------------------------------

    def _program(self, argv: Sequence[str], directory: Path, timeout_s: float) -> ActiveRun:
        return self._launch(lambda live: self._follow(live, argv, directory, timeout_s))

    async def _follow(
        self, live: ActiveRun, argv: Sequence[str], directory: Path, timeout_s: float
    ) -> Run:
        live.restart_clock()
        try:
            async with printing(argv, directory) as (process, told):

                async def interrupt() -> None:
                    process.signal(signal.SIGINT)

                async def kill() -> None:
                    process.signal(signal.SIGKILL)

                ladder = GracefulTermination(timeout_s, self._grace_s, interrupt, kill)
                with self._stoppable(live, ladder, lambda: process.signal(signal.SIGKILL)):
                    while (output := await ladder.next(told.next)) is not None:
                        live.add(frames.Frame(output, None, len(output.text)))
                        if live.over:
                            await ladder.stop(StopReason.OUTPUT)
                code = await process.wait()
        except errors.Unavailable as error:
            return live.finish(Status.ERROR, error=RunError("CommandNotStarted", str(error), ""))
        status, cause = termination.ending_of_command(code, ladder.why, oom_kills=0)
        told_error = termination.explanation((status, cause), LimitsPolicy())
        return live.finish(status, cause=cause, error=told_error, exit_code=code)

    @contextmanager
    def _stoppable(
        self, live: ActiveRun, ladder: GracefulTermination, kill: Callable[[], None]
    ) -> Iterator[None]:
        going = self._going[live] = _Going(ladder, kill)
        try:
            yield
        finally:
            del self._going[live]
            if going.killing is not None:
                going.killing.cancel()

    def _launch(self, drive: Callable[[ActiveRun], Awaitable[Run]]) -> ActiveRun:
        if self._closed:
            raise _closed("is closed")
        live = ActiveRun(f"run-{secrets.token_hex(6)}", _OUTPUT_MAX)
        task = asyncio.create_task(self._drive(live, drive))
        self._tasks[live] = task
        task.add_done_callback(lambda _: self._over(live))
        return live

    def _over(self, live: ActiveRun) -> None:
        del self._tasks[live]
        live.fail(_closed("was closed before this ran"))  # if nothing came of it

    async def _drive(self, live: ActiveRun, drive: Callable[[ActiveRun], Awaitable[Run]]) -> None:
        try:
            await drive(live)
        except asyncio.CancelledError:
            live.fail(_closed("was closed while this ran"))
            raise
        except errors.SbxError as error:
            live.fail(error)
        except Exception as error:  # noqa: BLE001  # the border: a task's failure is its run's
            _log.error("a run failed in sbx itself", exc_info=error)
            broken = errors.Broken(f"the run failed in sbx itself: {error!r}")
            broken.__cause__ = error
            live.fail(broken)


class ExtraFiles:
    """Files beside the working directory, in a directory that is made by the first of them."""

    def __init__(self) -> None:
        self._place: Path | None = None
        self._making = asyncio.Lock()

    async def put(self, path: str | Path, name: str | None = None) -> Upload:
        content = await HostFiles(Path.cwd()).read_bytes(str(path))
        return await self.put_bytes(name or Path(path).name, content)

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        check_name(name)
        async with self._making:
            if self._place is None:
                self._place = Path(await in_thread(tempfile.mkdtemp, "", "sbx-beside-"))
        await HostFiles(self._place).write(name, content)
        return await in_thread(_upload, self._place / name)

    async def list(self) -> tuple[Upload, ...]:
        place = self._place
        return () if place is None else await in_thread(_uploads, place)

    async def close(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await in_thread(shutil.rmtree, place, True)


def _uploads(place: Path) -> tuple[Upload, ...]:
    return tuple(_upload(path) for path in sorted(place.iterdir()))


def _upload(path: Path) -> Upload:
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    found = path.stat()
    return Upload(path.name, found.st_size, digest, str(path), found.st_mtime)


def _checked(asked: float | None) -> float:
    """Raises BadRequest `invalid_timeout`."""
    if asked is None:
        return _TIMEOUT_S
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        raise errors.BadRequest(
            f"a time-out is a number of seconds above 0, not {asked!r}", code="invalid_timeout"
        )
    return float(min(asked, _TIMEOUT_MAX_S))


def _closed(how: str) -> errors.Closed:
    return errors.Closed(f"the box of the project {how}", hint="use the project again")
