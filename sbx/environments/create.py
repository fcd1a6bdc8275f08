"""The creation of an environment, step by step; it exists only after the last step.

    claim       lock the name: another creation of it fails
    python      find the requested Python
    venv        create an empty virtual environment
    lock        resolve the requirements to versions and hashes
    install     install exactly the locked packages
    check       check that the kernel's modules exist
    files       make them readable for all users, and hash them
    publish     write the record, and rename it into place

Commands run on the host, as the user that requests the environment. Only with `build` do they
include code of a package.
"""

import asyncio
import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec
from msgspec import Struct
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

OnStep = Callable[[str, str], None]  # the step, and a line about it


class EnvironmentSpec(Struct, frozen=True):
    """The environment to create. `timeout_s` is for the whole creation. `build`: also use source
    distributions, whose code runs on the host as the current user."""

    name: str
    packages: tuple[PackageRequirement, ...]
    python: str | None = None
    installer: installers.Choice = "auto"
    build: bool = False
    timeout_s: float = 1800.0


async def create(environments: Environments, spec: EnvironmentSpec, on_step: OnStep) -> Environment:
    """Create an environment. Leave nothing behind if it fails or is cancelled.

    Raise BadRequest (`invalid_environment`, `invalid_requirement`, `python_unsupported`,
    `hash_mismatch`), Conflict (`environment_exists`, `environment_in_the_making`), Denied
    `environment_not_private`, Unavailable (`python_unavailable`, `installer_unavailable`,
    `environment_unresolved`, `environment_not_installed`, `environment_timeout`,
    `environment_broken`).
    """
    until = asyncio.get_running_loop().time() + spec.timeout_s
    checked(spec.name)
    if not spec.build:
        requirements.refuse_sources(spec.packages)
    claim = await _claimed(environments, spec.name)
    try:
        python = await pythons.find(spec.python)
        on_step("python", f"Python {python.text} ({python.executable})")
        return await _Making(claim, spec, python, on_step, until).run()
    except OSError as error:
        raise Unavailable(
            f"the environment {spec.name} cannot be created: {error.strerror or error}",
            code="environment_broken",
            hint="free some space, or set SBX_ENVIRONMENTS to another place",
        ) from error
    finally:
        await run_to_completion(in_thread(claim.end))


class _Making:
    def __init__(
        self,
        claim: NameLock,
        spec: EnvironmentSpec,
        python: pythons.Python,
        on_step: OnStep,
        until: float,
    ) -> None:
        self._claim = claim
        self._spec = spec
        self._python = python
        self._on_step = on_step
        self._step = "venv"
        self._steps = StepRunner(
            lambda line: on_step(self._step, line), until, inherited=(claim.directory,)
        )
        self._venv = claim.path / "venv"
        self._executable = self._venv / "bin" / "python"

    async def run(self) -> Environment:
        installer = await installers.choose(
            self._spec.installer, self._python, self._steps, build=self._spec.build
        )
        await self._make_venv()
        lock = await self._lock(installer)
        packages = await self._install(installer, lock)
        interpreter = await self._check()
        hashes = await self._hash()
        listed = msgspec.json.encode(hashes.entries)
        await in_thread(self._claim.write, FILES, listed)
        record = EnvironmentRecord(
            format=FORMAT,
            name=self._spec.name,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            python=self._python.text,
            base=self._python.executable,
            executable=interpreter.executable,
            prefixes=interpreter.prefixes,
            installer=installer.text,
            requirements=tuple(package.text for package in self._spec.packages),
            packages=packages,
            algorithm=ALGORITHM,
            digest=hashlib.new(ALGORITHM, listed).hexdigest(),
            lock=hashlib.new(ALGORITHM, lock.encode()).hexdigest(),
            files=hashes.files,
            bytes=hashes.bytes,
        )
        return await in_thread(self._claim.publish, record)

    async def _make_venv(self) -> None:
        self._begin_step("venv", "an empty environment")
        words = ("-m", "venv", "--without-pip", str(self._venv))
        output = await self._steps.run(self._python.executable, "-I", *words)
        if output.code != 0:
            raise Unavailable(
                f"Python {self._python.text} could not make a virtual environment",
                code="environment_not_installed",
                hint="install its module venv, or choose another one with --python",
                details={"output": list(output.lines)[-20:]},
            )

    async def _lock(self, installer: installers.Installer) -> str:
        self._begin_step("lock", f"versions, by {installer.text}")
        packages = requirements.with_kernel(self._spec.packages)
        lines = "".join(f"{package.text}\n" for package in packages)
        await in_thread(self._claim.write, "requirements.in", lines.encode())
        text = await installer.lock(
            self._steps, self._executable, self._claim.path / "requirements.in"
        )
        lock = requirements.lock_text(requirements.agreed(requirements.locked(text), packages))
        await in_thread(self._claim.write, "requirements.lock", lock.encode())
        return lock

    async def _install(self, installer: installers.Installer, lock: str) -> tuple[Package, ...]:
        locked = requirements.locked(lock)
        self._begin_step("install", f"{len(locked)} packages")
        await installer.install(
            self._steps, self._executable, self._claim.path / "requirements.lock"
        )
        packages = await in_thread(_installed, self._venv)
        there = {canonicalize_name(package.name) for package in packages}
        if missing := [package.name for package in locked if package.name not in there]:
            raise Unavailable(
                f"{installer.text} reported success, but {missing[0]} is not installed",
                code="environment_not_installed",
                hint="look for user, target or prefix in `pip config list`",
            )
        return packages

    async def _check(self) -> Interpreter:
        """Return the parts of it that a sandbox needs. Its Python must start, and have the kernel.

        It starts without its site-packages (-S): a .pth file in them is code that would run here.
        """
        self._begin_step("check", "that a kernel can run")
        output = await self._steps.run(str(self._executable), "-I", "-S", "-c", _ASK, keep=True)
        if output.code != 0 or not await in_thread(_has_kernel, self._venv):
            raise Unavailable(
                "the new environment does not work: "
                + ("it has no IPython" if output.code == 0 else "its Python does not start"),
                code="environment_not_installed",
                hint="choose another Python with --python, or other packages",
                details={"output": list(output.lines)[-20:]},
            )
        base = tuple(map(str, json.loads(output.out)))
        return interpreter_of(str(self._executable), (str(self._venv), *base))

    async def _hash(self) -> FileHashes:
        self._begin_step("files", "every file")
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

    def _begin_step(self, step: str, line: str) -> None:
        self._step = step
        self._on_step(step, line)


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
    return PathFinder.find_spec("IPython", _sites(venv)) is not None


def _installed(venv: Path) -> tuple[Package, ...]:
    distributions = importlib.metadata.distributions(path=_sites(venv))
    packages = (
        Package(str(package.metadata["Name"]), package.version) for package in distributions
    )
    return tuple(sorted(packages, key=lambda package: package.name.lower()))
