"""The creation of an environment, step by step; until the last of them there is none.

    claim       the name is taken: another creation of it is told so
    python      the one that is asked for is found
    venv        an empty virtual environment
    lock        what is asked for becomes versions and hashes
    install     exactly what was locked
    check       the kernel's modules are there
    files       readable for everybody, and hashed
    publish     the record is written, and renamed into place

Commands run on the host, as whoever asks for the environment; only with `build` is code of a
package among them.
"""

import asyncio
import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name

from sbx.aio import in_thread, run_to_completion
from sbx.environments import installers, pythons, requirements
from sbx.environments.directory import FILES, Environments, NameLock, checked
from sbx.environments.interpreter import interpreter_of
from sbx.environments.manifest import FileHashes, contents, make_readable
from sbx.environments.record import ALGORITHM, FORMAT, Environment, EnvironmentRecord, Package
from sbx.environments.requirements import PackageRequirement
from sbx.environments.step_runner import StepRunner
from sbx.errors import Unavailable
from sbx.isolation.launch_plan import Interpreter

_ASK = "import json, sys; print(json.dumps([sys.base_prefix, sys.base_exec_prefix]))"

Tell = Callable[[str, str], None]  # the step, and what there is to say of it


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What is to be made. `timeout_s` is for all of it; `build`: source distributions, whose code
    runs here and now as whoever asks, are taken too."""

    name: str
    wanted: tuple[PackageRequirement, ...]
    python: str | None = None
    installer: installers.Choice = "auto"
    build: bool = False
    timeout_s: float = 1800.0


async def create(environments: Environments, asked: EnvironmentSpec, tell: Tell) -> Environment:
    """Make it. However it fails, and also when it is cancelled, nothing of it is left.

    Raises BadRequest (`invalid_environment`, `invalid_requirement`, `python_unsupported`,
    `hash_mismatch`), Conflict (`environment_exists`, `environment_in_the_making`), Denied
    `environment_not_private`, Unavailable (`python_unavailable`, `installer_unavailable`,
    `environment_unresolved`, `environment_not_installed`, `environment_timeout`,
    `environment_broken`).
    """
    until = asyncio.get_running_loop().time() + asked.timeout_s
    checked(asked.name)
    if not asked.build:
        requirements.refuse_sources(asked.wanted)
    claim = await _claimed(environments, asked.name)
    try:
        python = await pythons.find(asked.python)
        tell("python", f"Python {python.text} ({python.executable})")
        return await _Making(claim, asked, python, tell, until).run()
    except OSError as error:
        raise Unavailable(
            f"the environment {asked.name} cannot be made: {error.strerror or error}",
            code="environment_broken",
            hint="free some space, or set SBX_ENVIRONMENTS to another place",
        ) from error
    finally:
        await run_to_completion(in_thread(claim.end))


class _Making:
    def __init__(
        self,
        claim: NameLock,
        asked: EnvironmentSpec,
        python: pythons.Python,
        tell: Tell,
        until: float,
    ) -> None:
        self._claim = claim
        self._asked = asked
        self._python = python
        self._tell = tell
        self._step = "venv"
        self._steps = StepRunner(
            lambda line: tell(self._step, line), until, inherited=(claim.directory,)
        )
        self._venv = claim.path / "venv"
        self._executable = self._venv / "bin" / "python"

    async def run(self) -> Environment:
        installer = await installers.choose(
            self._asked.installer, self._python, self._steps, build=self._asked.build
        )
        await self._make_venv()
        lock = await self._lock(installer)
        packages = await self._install(installer, lock)
        interpreter = await self._check()
        found = await self._hash()
        listed = msgspec.json.encode(found.entries)
        await in_thread(self._claim.write, FILES, listed)
        record = EnvironmentRecord(
            format=FORMAT,
            name=self._asked.name,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            python=self._python.text,
            base=self._python.executable,
            executable=interpreter.executable,
            prefixes=interpreter.prefixes,
            installer=installer.text,
            requirements=tuple(one.text for one in self._asked.wanted),
            packages=packages,
            algorithm=ALGORITHM,
            digest=hashlib.new(ALGORITHM, listed).hexdigest(),
            lock=hashlib.new(ALGORITHM, lock.encode()).hexdigest(),
            files=found.files,
            bytes=found.bytes,
        )
        return await in_thread(self._claim.publish, record)

    async def _make_venv(self) -> None:
        self._say("venv", "an empty environment")
        words = ("-I", "-m", "venv", "--without-pip", str(self._venv))
        said = await self._steps.run(self._python.executable, *words)
        if said.code != 0:
            raise Unavailable(
                f"Python {self._python.text} could not make a virtual environment",
                code="environment_not_installed",
                hint="install its module venv, or choose another one with --python",
                details={"output": list(said.lines)[-20:]},
            )

    async def _lock(self, installer: installers.Installer) -> str:
        self._say("lock", f"versions, by {installer.text}")
        wanted = requirements.with_kernel(self._asked.wanted)
        asked = "".join(f"{one.text}\n" for one in wanted)
        await in_thread(self._claim.write, "requirements.in", asked.encode())
        text = await installer.lock(
            self._steps, self._executable, self._claim.path / "requirements.in"
        )
        lock = requirements.lock_text(requirements.agreed(requirements.locked(text), wanted))
        await in_thread(self._claim.write, "requirements.lock", lock.encode())
        return lock

    async def _install(self, installer: installers.Installer, lock: str) -> tuple[Package, ...]:
        locked = requirements.locked(lock)
        self._say("install", f"{len(locked)} packages")
        await installer.install(
            self._steps, self._executable, self._claim.path / "requirements.lock"
        )
        packages = await in_thread(_installed, self._venv)
        there = {canonicalize_name(one.name) for one in packages}
        if missing := [one.name for one in locked if one.name not in there]:
            raise Unavailable(
                f"{installer.text} said that it installed {missing[0]}, and it is not there",
                code="environment_not_installed",
                hint="look for user, target or prefix in `pip config list`",
            )
        return packages

    async def _check(self) -> Interpreter:
        """What a sandbox is to be shown of it; its Python must start, and have the kernel.

        Without its site-packages (-S): a .pth file in them is code, and would run here.
        """
        self._say("check", "that a kernel can run")
        said = await self._steps.run(str(self._executable), "-I", "-S", "-c", _ASK, keep=True)
        if said.code != 0 or not await in_thread(_has_kernel, self._venv):
            raise Unavailable(
                "the new environment does not work: "
                + ("it has no IPython" if said.code == 0 else "its Python does not start"),
                code="environment_not_installed",
                hint="choose another Python with --python, or other packages",
                details={"output": list(said.lines)[-20:]},
            )
        base = tuple(map(str, json.loads(said.out)))
        return interpreter_of(str(self._executable), (str(self._venv), *base))

    async def _hash(self) -> FileHashes:
        self._say("files", "every file")
        cancelled = threading.Event()

        def act() -> FileHashes:
            make_readable(str(self._venv))
            return contents(str(self._venv), lambda: not cancelled.is_set())

        task = asyncio.ensure_future(in_thread(act))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled.set()
            await run_to_completion(asyncio.wait([task]))
            raise

    def _say(self, step: str, what: str) -> None:
        self._step = step
        self._tell(step, what)


async def _claimed(environments: Environments, name: str) -> NameLock:
    claims: list[NameLock] = []
    try:
        await in_thread(lambda: claims.append(environments.claim(name)))
    except asyncio.CancelledError:
        for claim in claims:
            await run_to_completion(in_thread(claim.end))
        raise
    return claims[0]


def _sites(venv: Path) -> list[str]:
    return list(map(str, (venv / "lib").glob("python3*/site-packages")))


def _has_kernel(venv: Path) -> bool:
    """Looks for it, and imports nothing."""
    return PathFinder.find_spec("IPython", _sites(venv)) is not None


def _installed(venv: Path) -> tuple[Package, ...]:
    found = importlib.metadata.distributions(path=_sites(venv))
    packages = (Package(str(one.metadata["Name"]), one.version) for one in found)
    return tuple(sorted(packages, key=lambda one: one.name.lower()))
