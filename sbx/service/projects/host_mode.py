"""A session of a project whose sandbox is off: the host itself, as the user who runs sbx.

No wall stands around anything here (policy `host`, see `sbx.isolation.host`). The operator has to
allow it (`allow_host_mode`). It is refused to a service that gave up root's rights. Root gets it in
directories of root only, and only if the setting `project_owners` names root.

Runs are those of every sandbox: bounded in time and output, with one result each. Cells run in one
guest and commands in another, so that commands survive a kernel that dies. A command ends with its
process group, and both guests end with the session. A process that makes itself a session leader
(setsid) leaves its group, and stays, as under any shell.
"""

import asyncio
import os
import shutil
import tempfile
from hashlib import file_digest
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from sbx import errors
from sbx.agent.sandbox import ToolUploads
from sbx.aio import in_thread, run_to_completion
from sbx.isolation.host import HOST_POLICY, HostProcess, host_plan
from sbx.isolation.receipt import Receipt
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.policy.tables import LimitsPolicy
from sbx.protocol.files import Upload
from sbx.protocol.languages import check_language
from sbx.protocol.runs import RunError, Status
from sbx.protocol.surroundings import Surroundings
from sbx.runtime.files.disk_limit import DiskLimit
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.run import checks
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import ClosedReason
from sbx.service.projects.host_files import HostFiles
from sbx.workspace.paths import check_name

_START_S = 60.0
_NOT_HANDED_ON = frozenset(
    ("API_KEY", "SBX_KEY", "SANDBOX_API_KEY", "BAY_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
)
# Only the limits of time and output hold. The policy has no file, so that no request can name it.
POLICY = Policy(name=HOST_POLICY, limits=LimitsPolicy(run_timeout=120.0, output_max=16 << 20))
# sbx keeps no files for such a session, and watches none.
_NO_FILES = cast("OpenFiles", SimpleNamespace(quarantine=None, measured=None, host_directory=None))
_GONE = ClosedReason("the session of the project", "its variables are gone")


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
        """Create a session. `uploads`: those of a persistent conversation; None: a directory that
        is removed with the session. `grace_s`: between an interrupt and the kill. `lost`: an
        earlier session of this conversation had variables."""
        self._directory = directory
        self._grace_s = grace_s
        self._python = self._context("python", had_kernel=lost)
        self._commands = self._context("commands")
        self._own = ExtraFiles()
        self.files = HostFiles(directory)
        self.uploads: ToolUploads = uploads if uploads is not None else self._own

    @property
    def busy(self) -> bool:
        return self._python.busy or self._commands.busy

    @property
    def stateful(self) -> bool:
        """Whether Python has, or had, variables that a caller may count on."""
        return self._python.state_is_kept

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the live kernel, which states that no wall is in force."""
        return self._python.receipt

    async def allow_commands(self) -> None:
        """Do nothing: commands are allowed."""

    async def surroundings(self) -> Surroundings:
        """Return the directory of the host, and the languages of `start_script`."""
        return Surroundings("host", str(self._directory), languages=("bash",))

    # -- runs -----------------------------------------------------------------------------------

    def start_run(self, code: str, *, timeout: float | None = None) -> ActiveRun:
        """Start a cell of Python, which keeps its variables for the next one. Raise BadRequest
        `invalid_code`, `invalid_timeout`, TooLarge, Closed."""
        return self._python.start_run(code, timeout=timeout)

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ActiveRun:
        """Start `/bin/bash -c command`. `cwd` begins at the working directory. Raise like
        `start_run`."""
        directory = checks.directory(str(self._directory / (cwd or ".")))
        checks.check_command(command)
        try:
            os.stat(f"{directory}/.")
        except OSError as error:
            self._commands.check_open()
            run = self._commands.new_run()
            run.finish(Status.ERROR, error=RunError("CommandNotStarted", str(error), ""))
            return run
        return self._commands.start_shell(command, timeout=timeout, cwd=directory)

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> ActiveRun:
        """Start a script of bash; other languages are commands here. Raise like `start_run`, and
        BadRequest `unknown_language`, `language_unavailable`."""
        if check_language(language) != "bash":
            raise errors.BadRequest(
                f"without a sandbox there is no {language} except the programs of the host",
                code="language_unavailable",
                hint="write the code to a file, and run it by a command",
            )
        return self.start_shell(code, timeout=timeout)

    async def give_up(self, run: ActiveRun, /) -> None:
        """Interrupt a run whose caller has gone, and kill it if it ignores that."""
        for context in (self._python, self._commands):
            await context.give_up(run, kill=True)

    async def save_result(self, name: str, content: bytes) -> str:
        """Keep a long result until the session is closed, and return the path to read it.

        Nothing is written into the working directory.
        """
        return (await self._own.put_bytes(name, content)).path

    async def close(self) -> None:
        """End all runs, and every process that was started."""
        self._python.leave(_GONE)
        self._commands.leave(_GONE)
        await run_to_completion(self._end())

    async def _end(self) -> None:
        ends = (self._python.close(_GONE), self._commands.close(_GONE), self._own.close())
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if end is not None:
                raise end

    def _context(self, name: str, *, had_kernel: bool = False) -> Context:
        return Context(
            name,
            name,
            POLICY,
            _no_files,
            self._start_kernel,
            self._grace_s,
            disk=DiskLimit(POLICY.limits),
            state_is_kept=had_kernel,
        )

    async def _start_kernel(self, _context: str, _opened: OpenFiles) -> Kernel:
        guest = await HostProcess.start(host_plan(POLICY.name, self._directory, _environment()))
        return await Kernel.start(guest, _config(self._directory), _START_S)


async def _no_files() -> OpenFiles:
    return _NO_FILES


def _environment() -> dict[str, str]:
    """Return the variables of this process without the keys of models and services: a model would
    read them in the output of `env`, and they would be stored with it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_HANDED_ON and not name.startswith("SBX_")
    }


def _config(directory: Path) -> dict[str, object]:
    return {
        "walls": False,
        "user": os.environ.get("USER", str(os.geteuid())),
        "home": os.path.expanduser("~"),
        "cwd": str(directory),
        "output_max": POLICY.limits.output_max,
    }


class ExtraFiles:
    """Files outside the working directory. The first one creates their directory."""

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
                self._place = Path(await in_thread(tempfile.mkdtemp, "", "sbx-session-"))
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
    status = path.stat()
    return Upload(path.name, status.st_size, digest, str(path), status.st_mtime)


def demand_of_root(directory: Path) -> None:
    """In host mode everything runs as the user who runs sbx, which has to own the directory."""
    if (uid := directory.stat().st_uid) != 0:
        raise errors.Denied(
            f"{directory} belongs to uid {uid}, and without a sandbox sbx would work in it as root",
            code="host_mode_refused",
            hint="run sbx as the owner of the directory, or turn the sandbox of the project on",
        )
