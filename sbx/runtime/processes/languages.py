"""The languages that the jails of a policy can run, found on the host in the paths that a jail
sees.

    find     search for bash, node, deno, java with its compiler, go; never below a workspace
    serving  decide which program serves a language (pure)
    Languages  both for one sandbox: the interpreter of a language, or how to install it

The result is kept for a while, so that a program is found without a restart after its installation.
A workspace may also bring TypeScript: a compiler in its node_modules, which runs only inside.
"""

import asyncio
import os
import re
import stat
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from sbx.environments.directory import Environments
from sbx.environments.interpreter import own_interpreter
from sbx.errors import BadRequest, SbxError
from sbx.isolation.launch_plan import Interpreter
from sbx.policy import Policy
from sbx.protocol.languages import LANGUAGES, Language

STRIPS_TYPES = (22, 13)  # the first Node.js whose node:module has stripTypeScriptTypes
COMPILERS = ("node_modules/typescript/package.json", "node_modules/esbuild/package.json")
_PLACES = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/go/bin")
_KEPT_S = 60.0
_KEPT_MAX = 64
_LINKS_MAX = 40  # as in Linux: path_resolution(7)
_ASK_S = 10.0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_INSTALL: dict[Language, tuple[str, str, str]] = {  # its program, its package, how to get it
    "bash": ("bash", "bash", "install bash on the host"),
    "javascript": ("node or deno", "nodejs", "install nodejs (or deno) on the host"),
    "typescript": (
        "deno, Node.js 22.13 or newer, or a compiler in node_modules",
        "nodejs",
        "install nodejs 22.13 or newer (or deno) on the host, or put the npm package typescript "
        "into node_modules of the workspace",
    ),
    "java": ("java with its compiler", "default-jdk", "install default-jdk on the host"),
    "go": ("go", "golang", "install golang on the host"),
}


class VisiblePrograms(Struct, frozen=True):
    """The programs of the host that a jail sees: `shown` are pairs of a path inside and its path on
    the host; `places` are the directories inside in which programs are searched."""

    shown: tuple[tuple[str, str], ...]
    places: tuple[str, ...]


class InstalledPrograms(Struct, frozen=True):
    """Paths of programs inside; None without the program. `node_version` is None if it is
    unknown."""

    bash: str | None = None
    node: str | None = None
    node_version: tuple[int, ...] | None = None
    deno: str | None = None
    java: str | None = None
    go: str | None = None


class ScriptInterpreter(Struct, frozen=True):
    """The interpreter of a language: `name` is bash, node, deno, java or go, `path` its path
    inside."""

    name: str
    path: str


def view_of(policy: Policy, interpreter: Interpreter) -> VisiblePrograms:
    """Return the programs that jails of this policy see."""
    shown = [(path, path) for path in policy.filesystem.read]
    shown += [(mount.target, mount.source) for mount in policy.filesystem.mount]
    shown += [(prefix, prefix) for prefix in interpreter.prefixes]
    tops = [mount.target for mount in policy.filesystem.mount]
    mounted = [place for top in tops for place in (f"{top}/bin", top)]
    beside_python = interpreter.executable.rpartition("/")[0]
    return VisiblePrograms(tuple(shown), tuple(dict.fromkeys((beside_python, *mounted, *_PLACES))))


def serving(
    language: Language, programs: InstalledPrograms, *, compiler: bool = False
) -> ScriptInterpreter | None:
    """Return the interpreter of this language; None without one. `compiler`: the workspace has one
    for TypeScript. Node.js goes before Deno, because most scripts are written for it."""
    match language:
        case "bash":
            return _tool("bash", programs.bash)
        case "javascript":
            return _tool("node", programs.node) or _tool("deno", programs.deno)
        case "typescript":
            strips = programs.node_version is not None and programs.node_version >= STRIPS_TYPES
            node = programs.node if strips or compiler else None
            return _tool("node", node) or _tool("deno", programs.deno)
        case "java":
            return _tool("java", programs.java)
        case "go":
            return _tool("go", programs.go)


def _tool(name: str, path: str | None) -> ScriptInterpreter | None:
    return ScriptInterpreter(name, path) if path is not None else None


def how_to_get(language: Language) -> str:
    """Return how to install a missing language, as a part of a sentence."""
    return _INSTALL[language][2]


def unavailable(language: Language, available: Sequence[str]) -> BadRequest:
    """Return BadRequest `language_unavailable`, with a hint how to install it."""
    needs, package, how = _INSTALL[language]
    return BadRequest(
        f"{language} cannot be run here: it needs {needs}",
        code="language_unavailable",
        hint=how,
        details={"language": language, "install": package, "available": list(available)},
    )


# -- looking ---------------------------------------------------------------------------------------


def find(view: VisiblePrograms) -> InstalledPrograms:
    """Look now. Blocks: it asks a Node.js for its version, 10 s at most."""
    node = _program("node", view) or _program("nodejs", view)
    java = _program("java", view)
    return InstalledPrograms(
        bash=_inside(_program("bash", view)),
        node=_inside(node),
        node_version=_version(node[1]) if node is not None else None,
        deno=_inside(_program("deno", view)),
        # A runtime without javac, which lies next to the real java, cannot run a source file.
        java=_inside(java) if java and _runs(os.path.dirname(java[1]) + "/javac") else None,
        go=_inside(_program("go", view)),
    )


def _inside(program: tuple[str, str] | None) -> str | None:
    return program[0] if program is not None else None


def _program(name: str, view: VisiblePrograms) -> tuple[str, str] | None:
    """Return the path of a program inside, and the real file on the host."""
    for place in view.places:
        real = _real(f"{place}/{name}", view)
        if real is not None and _runs(real):
            return f"{place}/{name}", real
    return None


def _real(inside: str, view: VisiblePrograms) -> str | None:
    """Return the file of the host behind a path inside. Return None if a link leads to a place that
    a jail does not see, or sees elsewhere."""
    path = inside
    for _ in range(_LINKS_MAX):
        host = _on_host(path, view)
        if host is None:
            return None
        if not os.path.islink(host):
            real = os.path.realpath(host)  # through directories that are links
            roots = (os.path.realpath(source) for _, source in view.shown)
            return real if any(_below(real, root) for root in roots) else None
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(host)))
    return None


def _on_host(path: str, view: VisiblePrograms) -> str | None:
    for target, source in view.shown:
        if _below(path, target):
            return source + path[len(target) :]
    return None


def _below(path: str, top: str) -> bool:
    return PurePosixPath(path).is_relative_to(top)


def _runs(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _version(real: str) -> tuple[int, ...] | None:
    """Run a program for its version, but only if no user except root and this one can have written
    it."""
    try:
        status = os.stat(real)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & _WRITABLE_BY_OTHERS:
            return None
        output = subprocess.run(
            [real, "--version"],
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_ASK_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.match(rb"v(\d{1,4})\.(\d{1,4})\.(\d{1,4})", output)
    return tuple(int(part) for part in match.groups()) if match else None


class Cache:
    """The programs of up to `most` views, each for `kept_s` seconds."""

    def __init__(self, *, kept_s: float = _KEPT_S, most: int = _KEPT_MAX) -> None:
        self._kept_s = kept_s
        self._most = most
        self._found: OrderedDict[VisiblePrograms, tuple[float, InstalledPrograms]] = OrderedDict()
        self._changing = threading.Lock()

    def find(self, view: VisiblePrograms) -> InstalledPrograms:
        """Do the same as the function `find`, unless the result is kept."""
        now = time.monotonic()
        with self._changing:
            kept = self._found.get(view)
            if kept is not None and now - kept[0] < self._kept_s:
                return kept[1]
        programs = find(view)
        with self._changing:
            self._found[view] = (now, programs)
            self._found.move_to_end(view)
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        return programs

    def kept(self, view: VisiblePrograms) -> InstalledPrograms | None:
        """Return the kept result, without a search."""
        kept = self._found.get(view)
        return kept[1] if kept is not None and time.monotonic() - kept[0] < self._kept_s else None


_cache = Cache()


def available(policy: Policy, environments: Environments) -> dict[Language, ScriptInterpreter]:
    """Return the languages that jails of this policy can run without the workspace, each with its
    interpreter; none if the policy does not allow processes, or names a missing environment.
    Programs of another interpreter that is named by its path are not searched. Block as `find`."""
    if not policy.processes or "shell" not in policy.capabilities:
        return {}
    interpreter = _interpreter_of(policy, environments)
    if interpreter is None:
        return {}
    programs = _cache.find(view_of(policy, interpreter))
    tools = {language: serving(language, programs) for language in LANGUAGES}
    return {language: tool for language, tool in tools.items() if tool is not None}


def _interpreter_of(policy: Policy, environments: Environments) -> Interpreter | None:
    if policy.interpreter is None:
        return own_interpreter()
    if (name := policy.environment) is None:
        return Interpreter(policy.interpreter, ())
    try:
        return environments.interpreter(name, policy.name)
    except SbxError:
        return None


class Languages:
    """The languages of one sandbox."""

    def __init__(self, policy: Policy, interpreter: Interpreter) -> None:
        self._view = view_of(policy, interpreter)

    async def tool(
        self, language: Language, has_file: Callable[[str], Awaitable[bool]]
    ) -> ScriptInterpreter:
        """Return the interpreter of this language. `has_file` looks for a file of the workspace.

        Raise BadRequest `language_unavailable`.
        """
        programs = await self._programs()
        tool = serving(language, programs)
        if tool is None and language == "typescript" and programs.node is not None:
            for path in COMPILERS:
                if await _is_there(has_file, path):
                    return ScriptInterpreter("node", programs.node)
        if tool is None:
            raise unavailable(language, [other for other in LANGUAGES if serving(other, programs)])
        return tool

    async def names(self) -> tuple[Language, ...]:
        """Return the languages that may work: a compiler of TypeScript may be in the workspace."""
        programs = await self._programs()
        return tuple(
            language
            for language in LANGUAGES
            if serving(language, programs) is not None
            or (language == "typescript" and programs.node is not None)
        )

    async def _programs(self) -> InstalledPrograms:
        programs = _cache.kept(self._view)
        if programs is None:
            programs = await asyncio.to_thread(_cache.find, self._view)
        return programs


async def _is_there(has_file: Callable[[str], Awaitable[bool]], path: str) -> bool:
    try:
        return await has_file(path)
    except SbxError:
        return False
