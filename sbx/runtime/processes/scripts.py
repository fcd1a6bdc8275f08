"""A script in another language, as a plan for PID 1 of a jail. Pure.

The started process writes the code to a file below /tmp, inside: an argument would have a limited
length and be visible to every process, and standard input belongs to the script. Caches and
configuration lie below /tmp too.

A language runtime that adapts to the machine would see the memory and CPUs of the host, because the
cgroup is not visible inside. So each one gets the limits of the policy, and a program that needs
more gets an error of its language before Linux kills it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from msgspec import Struct, structs

from sbx.errors import TooLarge
from sbx.isolation.launch_plan import GUEST
from sbx.policy import Policy
from sbx.protocol.languages import Language, check_arguments
from sbx.protocol.runs import CODE_MAX, STDIN_MAX
from sbx.run_methods import RunCall
from sbx.runtime.processes.languages import ScriptInterpreter
from sbx.runtime.run import checks

NODE_SCRIPT = f"{GUEST}/sbx/guest/tools/script.cjs"
_TMP = "/tmp"  # noqa: S108  # the jail's own, a fresh tmpfs
_MIB = 1 << 20
_HEAP_SHARE = 0.5  # of memory_max; the rest is for the kernel, /tmp, threads, compilers, code
_BUILD = 'go build -o "$0.out" "$0" && exec "$0.out" "$@"'  # `go run` would hide the exit code
_NAMES: Mapping[Language, str] = {
    "bash": "script.sh",
    "javascript": "script.mjs",
    "typescript": "script.mts",
    "java": "Main.java",
    "go": "main.go",
}


class Script(Struct, frozen=True):
    """A checked request. `env` is the caller's, and goes before the variables of sbx."""

    code: str
    language: Language
    args: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    stdin: str


class Program(Struct, frozen=True):
    """A process to be started inside, and the files below /tmp that it writes first."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    stdin: str
    files: tuple[tuple[str, str], ...] = ()


class PythonFile(Struct, frozen=True):
    """A file of Python, for the kernel. `path`: the path inside; `-c` and `-` are as for python3,
    with the `source`. `shows_value`: the value of the last expression is shown."""

    path: str
    source: bytes | None = None
    args: tuple[str, ...] = ()
    stdin: bytes | None = None
    cwd: str | None = None
    env: Mapping[str, str] = {}
    shows_value: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the content of a `program_request`."""
        content = structs.asdict(self)  # msgspec encodes bytes in base64
        content["code"] = content.pop("source")
        return content


def check_file(policy: Policy, call: RunCall) -> PythonFile:
    """Check a request for a file of Python. Raise Denied `capability_not_supported`, BadRequest
    `invalid_arguments` and `invalid_env`, TooLarge `code_too_large`, InvalidPath."""
    checks.require_capability(policy, "python")
    checks.check_text(call.code, "path", checks.PATH_MAX)
    parts = ((call.source, "code", CODE_MAX), (call.stdin_data, "stdin", STDIN_MAX))
    for data, name, limit in parts:
        if data is not None and len(data) > limit:
            raise TooLarge(
                f"the {name} of {len(data)} bytes is longer than the limit of {limit} bytes",
                code="code_too_large",
                hint="put the data in a file of the workspace and read it from there",
                details={"limit": limit},
            )
    return PythonFile(
        path=call.code,
        source=call.source,
        args=check_arguments(call.args),
        stdin=call.stdin_data,
        cwd=None if call.cwd is None else checks.directory(call.cwd),
        env=checks.environment(call.env or {}),
        shows_value=call.shows_value,
    )


def check_script(
    policy: Policy,
    code: str,
    language: Language,
    *,
    args: Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: str | None,
) -> Script:
    """Check a request for a script. Raise Denied `capability_not_supported` and `processes_denied`,
    BadRequest `invalid_code`, `invalid_arguments` and `invalid_env`, TooLarge `code_too_large`,
    InvalidPath."""
    checks.require_processes(policy)
    checks.require_capability(policy, "shell")
    checks.check_text(code, "code")
    if stdin is not None:
        checks.check_text(stdin, "stdin")
    return Script(
        code=code,
        language=language,
        args=check_arguments(args),
        cwd=checks.directory(cwd),
        env=checks.environment(env or {}),
        stdin=stdin or "",
    )


def plan_script(script: Script, tool: ScriptInterpreter, policy: Policy, run_id: str) -> Program:
    """Return the program to start for a script, which lies in a directory named after its run."""
    name = _NAMES[script.language]
    directory = f"{_TMP}/.{run_id}"
    path = f"{directory}/{name}"
    files = [(path, script.code)]
    cpus = max(1, math.ceil(policy.limits.cpu_quota))
    heap_mib = max(16, int(policy.limits.memory_max * _HEAP_SHARE) // _MIB)
    env: dict[str, str] = {}
    match tool.name:
        case "bash":
            words = [tool.path, path]
        case "node":
            words = [tool.path, f"--max-old-space-size={heap_mib}"]
            words += [NODE_SCRIPT, script.language, path]
        case "deno":
            files.append((f"{directory}/imports.json", _imports(script.cwd, name)))
            words = [tool.path, "run", "--allow-all", "--no-prompt", "--quiet", "--no-lock"]
            words += [f"--import-map={directory}/imports.json"]
            words += [f"--v8-flags=--max-old-space-size={heap_mib}", path]
            env = {"DENO_DIR": f"{_TMP}/.cache/deno", "DENO_NO_UPDATE_CHECK": "1"}
        case "java":
            words = [tool.path, f"-Xmx{heap_mib}m", f"-XX:ActiveProcessorCount={cpus}"]
            words += ["-XX:+UseSerialGC", "-XX:-UsePerfData", f"-Djava.util.prefs.userRoot={_TMP}"]
            words += [path]
            env = {"CLASSPATH": f"{script.cwd}/lib/*:{script.cwd}/jars/*"}
        case _:
            words = ["/bin/bash", "-c", _BUILD, path]
            env = _go_environment(tool, heap_mib, cpus, offline=policy.network.mode == "none")
    return Program(
        argv=(*words, *script.args),
        cwd=script.cwd,
        env={**env, **script.env},
        stdin=script.stdin,
        files=tuple(files),
    )


def _go_environment(
    tool: ScriptInterpreter, heap_mib: int, cpus: int, *, offline: bool
) -> dict[str, str]:
    return {
        "PATH": f"{tool.path.rpartition('/')[0]}:/usr/local/bin:/usr/bin:/bin",
        "GOCACHE": f"{_TMP}/.cache/go-build",
        "GOPATH": f"{_TMP}/.cache/go",
        "GOENV": "off",  # it would lie in the workspace's home
        "GOTOOLCHAIN": "local",
        "GOTELEMETRY": "off",
        "GOFLAGS": "-buildvcs=false",
        "GOMAXPROCS": str(cpus),
        "GOMEMLIMIT": f"{heap_mib}MiB",
        **({"GOPROXY": "off"} if offline else {}),
    }


def _imports(cwd: str, name: str) -> str:
    """Return an import map that resolves `./x.ts` in the working directory of the script, not in
    the directory of its file."""
    beside = f"file://{quote(cwd.rstrip('/'))}/"
    return json.dumps({"imports": {"./": beside, f"./{name}": f"./{name}"}})
