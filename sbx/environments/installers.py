"""pip and uv: the choice between them, and how each locks packages and installs them.

sbx passes no package source to them: each uses its own configuration. uv does not read the
configuration of pip. Therefore uv is the automatic choice only if pip has no package source
configured, or uv has one.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sbx.aio import in_thread
from sbx.environments.manifest import make_readable
from sbx.environments.pythons import Python, find
from sbx.environments.requirements import (
    LockFile,
    direct_names,
    lock_text,
    locked,
    parse_words,
)
from sbx.environments.step_runner import StepOutput, StepRunner
from sbx.errors import Conflict, Unavailable

Choice = Literal["auto", "pip", "uv"]
_OLDEST_PIP = Version("23.0")  # the first whose --report is stable; --python came with 22.3
_LINES_REPORTED = 20
_INSTALL_S = 600.0
_REPORT_MAX = 64 << 20
# The options that configure the package sources.
_SOURCES = (
    "index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "proxy", "cert",
    "client-cert",
)  # fmt: skip
# Run pip in the Python of the environment. Without the word "build" it starts no program. The
# metadata of a wheel can name a source distribution at a URL, which pip builds in a child process
# despite --only-binary, so this also covers each other way to a build. The exceptions are programs
# of the host that pip asks for a password or for the name of the system. With -S no .pth file of
# the environment runs here, and its packages are found all the same. An address that only metadata
# names is refused before pip fetches it: the author of a package would choose a host to contact.
_RUN_PIP = """
import os, runpy, site, sys
from importlib.machinery import PathFinder
pip, mode = sys.argv[1:3]
del sys.argv[1:3]
if sys.flags.no_site:
    top = os.path.dirname(os.path.dirname(sys.executable))
    config = os.path.join(top, "pyvenv.cfg")
    version = "python%d.%d" % sys.version_info[:2]
    sites = [os.path.join(top, "lib", version, "site-packages")]
    if not os.path.exists(config):
        sites = site.getsitepackages()
    elif "include-system-site-packages = true" in open(config).read().lower():
        sites += site.getsitepackages([sys.base_prefix])
    sys.path += filter(os.path.isdir, sites)
def refuse(event, args):
    if event in ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
                 "subprocess.Popen"):
        program = os.path.basename(os.fsdecode(args[0])) if args else "fork"
        if program not in ("keyring", "lsb_release", "rustc", "uname"):
            raise PermissionError(1, "a package needs a build, which would run its code", program)
class OwnPip:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [os.path.dirname(pip)]) if name == "pip" else None
def refuse_addresses():
    from pip._internal.exceptions import InstallationError
    from pip._internal.req import constructors
    parse = constructors.install_req_from_req_string
    requested = open(sys.argv[sys.argv.index("-r") + 1]).read().split()
    def checked(*args, **options):
        needed = parse(*args, **options)
        if needed.req.url and needed.req.url not in requested:
            raise InstallationError(f"the metadata of a package demands {needed.req}")
        return needed
    constructors.install_req_from_req_string = checked
if mode != "build":
    sys.addaudithook(refuse)
    sys.meta_path.insert(0, OwnPip)
    refuse_addresses()
runpy.run_path(os.path.join(pip, "__pip-runner__.py"), run_name="__main__")
"""
_UV_SOURCES = (
    "UV_CONFIG_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX",
    "UV_INDEX_URL",
)  # fmt: skip


class Installer(Struct, frozen=True):
    """`command` runs the installer. `build`: whether source distributions may be built.

    `lock` returns the text of requirements.lock. `install` installs exactly these packages into the
    environment of `python`. Both raise Unavailable with the last lines of output in its details.
    """

    command: tuple[str, ...]
    version: str
    build: bool

    @property
    def text(self) -> str:
        return f"{type(self).__name__.lower()} {self.version}"

    async def lock(self, steps: StepRunner, python: Path, requirements_in: Path) -> str:
        raise NotImplementedError

    async def install(self, steps: StepRunner, python: Path, lock: Path) -> None:
        raise NotImplementedError

    async def _checked(self, packages: list[LockFile], requirements_in: Path) -> list[LockFile]:
        """Return the packages. Raise Unavailable if the metadata of one of them, and not the
        request, chose the address of another one."""
        requested = direct_names(await in_thread(requirements_in.read_text))
        for package in packages if not self.build else ():
            if " @ " in package.text and package.name not in requested:
                raise Unavailable(
                    f"the metadata of a package demands {package.text[:200]!a}, which is not from"
                    " the index",
                    code="environment_unresolved",
                    hint="request it by its address, or use --build if you trust the package",
                )
        return packages


class Pip(Installer, frozen=True):
    """`package` is the directory of pip itself."""

    package: str = ""

    async def lock(
        self, steps: StepRunner, python: Path, requirements_in: Path, *, missing: bool = False
    ) -> str:
        """`missing`: only the packages that are not installed there. No code of these runs."""
        report = requirements_in.with_name("report.json")
        output = await steps.run(
            *self._in(python, *(("-S",) if missing else ())),
            *("install", "--dry-run", "--progress-bar", "off", "--report", str(report)),
            *(() if missing else ("--ignore-installed",)),
            *_no_builds(self.build),
            *("-r", str(requirements_in)),
        )
        _check(output, "environment_unresolved", "the packages could not be resolved")
        try:
            packages = _of_report(json.loads(await in_thread(_taken, report)))
        except (ValueError, KeyError, TypeError) as error:
            raise _unlockable(f"the report of pip cannot be read: {error}") from error
        return lock_text(await self._checked(packages, requirements_in))

    async def install(
        self, steps: StepRunner, python: Path, lock: Path, *, target: Path | None = None
    ) -> None:
        """`target`: install into this directory instead of the environment."""
        output = await steps.run(
            *self._in(python, *(() if target is None else ("-S",))),
            *("install", "--no-deps", "--require-hashes", "--progress-bar", "off"),
            *(() if target is None else ("--target", str(target))),
            *_no_builds(self.build),
            *("-r", str(lock)),
        )
        _check(output, "environment_not_installed", "the packages could not be installed")

    def _in(self, python: Path, *options: str) -> tuple[str, ...]:
        mode = "build" if self.build else "wheels"
        return (str(python), "-I", *options, "-c", _RUN_PIP, self.package, mode, "--no-color")


class Uv(Installer, frozen=True):
    async def lock(self, steps: StepRunner, python: Path, requirements_in: Path) -> str:
        output = await steps.run(
            *self.command,
            *("pip", "compile", "--python", str(python), "--generate-hashes", "--no-annotate"),
            *("--no-header", "--no-emit-index-url", "--no-emit-find-links"),
            *_no_builds(self.build),
            str(requirements_in),
            keep=True,
        )
        _check(output, "environment_unresolved", "the packages could not be resolved")
        try:
            packages = locked(output.out.decode())
        except ValueError as error:
            raise _unlockable(f"{error} has no hash") from None
        return lock_text(await self._checked(packages, requirements_in))

    async def install(self, steps: StepRunner, python: Path, lock: Path) -> None:
        output = await steps.run(
            *self.command,
            *("pip", "install", "--python", str(python), "--require-hashes", "--no-deps"),
            *("--link-mode", "copy"),  # share no file with its cache
            *_no_builds(self.build),
            *("-r", str(lock)),
        )
        _check(output, "environment_not_installed", "the packages could not be installed")
        # Not by uv itself: its compiler loads the .pth files of the new packages.
        library = python.parent.parent / "lib"
        await steps.run(str(python), "-I", "-S", "-m", "compileall", "-qq", str(library))


async def choose(choice: Choice, python: Python, steps: StepRunner, *, build: bool) -> Installer:
    """Return the requested installer, or the available one. Raise Unavailable
    `installer_unavailable`."""
    uv = await _uv(steps, build) if choice != "pip" else None
    pip = _pip(python, build)
    if choice == "uv" or pip is None:
        installer: Installer | None = uv
    elif choice == "pip" or uv is None:
        installer = pip
    else:
        installer = pip if await _only_pip_is_configured(pip, steps) else uv
    if installer is not None:
        return installer
    raise _not_found("pip or uv" if choice == "auto" else choice)


async def install_missing(package: str, executable: str, directory: Path) -> None:
    """Install a package into a directory, with the dependencies that the environment of this Python
    lacks: wheels only, by the hashes of one lock, and in ten minutes at most.

    Raise Conflict `already_installed`, Unavailable `python_unavailable`, `installer_unavailable`,
    `environment_unresolved`, `environment_not_installed` and `environment_timeout`, and BadRequest
    `python_unsupported`.
    """
    until = asyncio.get_running_loop().time() + _INSTALL_S
    steps = StepRunner(lambda _: None, until)
    # Not the pip of this Python: its environment may have packages whose code must not run here.
    installer = _pip(await find(None), build=False)
    if installer is None:
        raise _not_found("pip")
    python, work = Path(executable), directory.parent
    await in_thread((work / "requirements.in").write_text, f"{package}\n")
    try:
        lock = await installer.lock(steps, python, work / "requirements.in", missing=True)
    except Unavailable as error:
        if not (output := error.details.get("output")):
            raise
        hint = f"the last line of pip: {output[-1]}"
        raise Unavailable(error.message, code=error.code, hint=hint) from error
    if not lock:
        raise Conflict(
            f"the package {package} is in the environment already",
            code="already_installed",
            hint="import it; its module may have another name",
        )
    await in_thread((work / "requirements.lock").write_text, lock)
    await installer.install(steps, python, work / "requirements.lock", target=directory)
    await in_thread(make_readable, str(directory))


def _pip(python: Python, build: bool) -> Pip | None:
    """Return the pip of the chosen Python, or that of our own environment."""
    if _is_new_enough(python.pip):
        return Pip((python.executable, "-I", "-m", "pip"), python.pip, build, python.pip_package)
    if importlib.util.find_spec("pip") is not None:
        pip = importlib.import_module("pip")
        if _is_new_enough(pip.__version__):
            command = (sys.executable, "-I", "-m", "pip")
            return Pip(command, pip.__version__, build, os.path.dirname(str(pip.__file__)))
    return None


def _is_new_enough(version: str) -> bool:
    try:
        return Version(version) >= _OLDEST_PIP
    except InvalidVersion:
        return False


async def _uv(steps: StepRunner, build: bool) -> Uv | None:
    path = shutil.which("uv")
    if path is not None and path.startswith("/"):  # never a uv in the working directory
        command: tuple[str, ...] = (path,)
    elif importlib.util.find_spec("uv") is not None:
        command = (sys.executable, "-I", "-m", "uv")
    else:
        return None
    output = await steps.run(*command, "--version", keep=True)
    words = output.out.decode(errors="replace").split()
    return Uv(command, words[1], build) if output.code == 0 and len(words) > 1 else None


async def _only_pip_is_configured(pip: Pip, steps: StepRunner) -> bool:
    if any(os.environ.get(name) for name in _UV_SOURCES):
        return False
    output = await steps.run(*pip.command, "config", "list", keep=True)
    keys = [line.partition("=")[0] for line in output.out.decode(errors="replace").splitlines()]
    return any(key.rpartition(".")[2] in _SOURCES for key in keys)


def _not_found(installer: str) -> Unavailable:
    return Unavailable(
        f"{installer}, which installs packages, was not found",
        code="installer_unavailable",
        hint="install one: python -m ensurepip, or put uv on PATH",
    )


def _no_builds(build: bool) -> tuple[str, ...]:
    return () if build else ("--only-binary", ":all:")


def _of_report(report: Any) -> list[LockFile]:
    """Return the packages in the output of `pip install --report`."""
    packages = []
    for item in report["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        info = item["download_info"]
        hashes = info.get("archive_info", {}).get("hashes", {})
        strong = [kind for kind in ("sha256", "sha512", "sha384") if kind in hashes]
        if not strong:
            raise _unlockable(f"{name} {version} has no hash")
        direct = item.get("is_direct") is True
        text = f"{name} @ {info['url']}" if direct else f"{name}=={Version(version)}"
        parse_words([text])  # checks the metadata, which the author of the package controls
        hashed = f"{strong[0]}:{hashes[strong[0]]}"
        packages.append(LockFile(canonicalize_name(name), text, (hashed,)))
    return packages


def _taken(report: Path) -> bytes:
    with report.open("rb") as file:
        data = file.read(_REPORT_MAX + 1)
    report.unlink()
    if len(data) > _REPORT_MAX:
        raise ValueError("it is too long")
    return data


def _check(output: StepOutput, code: str, message: str) -> None:
    if output.code == 0:
        return
    raise Unavailable(
        message, code=code, hint=_advice(output.lines), details={"output": _last(output.lines)}
    )


def _last(lines: Sequence[str]) -> list[str]:
    useful = [line for line in lines if not line.startswith(("WARNING: Location", "[notice]"))]
    return useful[-_LINES_REPORTED:]


def _advice(lines: Sequence[str]) -> str:
    text = "\n".join(lines).lower()
    for words, hint in _ADVICE:
        if any(word in text for word in words):
            return hint
    return "the lines above are from the installer"


_ADVICE = (
    (
        ("a package needs a build", "building source distributions is disabled"),
        "only wheels are installed, because a build runs code of the package on this host; use"
        " --build if you trust it",
    ),
    (
        ("the metadata of a package demands",),
        "the address is not from the index: request it by its address, or use --build if you trust"
        " the package",
    ),
    (
        ("conflicting dependencies", "resolutionimpossible", "unsatisfiable"),
        "request fewer fixed versions, or others: they contradict each other",
    ),
    (
        ("no matching distribution", "there is no version of", "not found in the package registry"),
        "check names and versions; without --build only wheels are taken, and a package may have "
        "none for this Python",
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
        hint="use an index with hashes, or another installer with --installer",
    )
