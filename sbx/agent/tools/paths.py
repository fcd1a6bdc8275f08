"""The paths that code in the sandbox uses, and how tools access them.

    /workspace/…, relative, /uploads/…    files of the sandbox, under its rules
    /tmp/…                                the tmpfs of the jail, through a small program inside

The program (sbx/guest/tools/tmp_files.py) receives its request as base64, so that no quoting of
bash or Python can break out of it. It runs next to the kernel and shares only the files with the
user's code. If commands are not allowed, or run in another jail than cells, the program runs as a
cell. The cell neither reads nor leaves variables of the user, and it waits for its turn.
"""

import asyncio
import base64
import binascii
import json
import posixpath
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from sbx.agent.sandbox import ToolRun, ToolSandbox, commands_allowed, in_project, is_sandboxed
from sbx.agent.tools.execution import followed
from sbx.errors import Broken, Conflict, Denied, InvalidPath, NotFound, SbxError, TooLarge
from sbx.protocol.files import FileEntry, Kind, Listing
from sbx.protocol.runs import Run

TMP = "/tmp"  # noqa: S108  # the fresh tmpfs of the jail
READ_MAX = 8 << 20  # bytes of a file that a tool reads
_TMP_WRITE_MAX = 4 << 20  # bytes; they are sent as code, as base64 in a literal
_COMMAND_MAX = 100_000  # characters; a longer command is a script, which is in /tmp meanwhile
_WORK_S = 20.0
_TURN_S = 120.0  # including the wait for a running cell
_NO_COMMANDS = ("processes_denied", "capability_not_supported", "language_unavailable")


async def read(sandbox: ToolSandbox, path: str) -> bytes:
    """Return the content of a file of at most READ_MAX bytes. Raise InvalidPath, NotFound,
    TooLarge, Denied."""
    if (below := _below_tmp(sandbox, path)) is None:
        try:
            entry = await sandbox.files.stat(path)
            if entry.size is not None and entry.size > READ_MAX:
                raise _too_large(path, entry.size)
            return await sandbox.files.read_bytes(path)
        except InvalidPath as error:
            raise _explained(path, error) from error
    answer = await _inside(sandbox, act="read", path=below, most=READ_MAX)
    if answer.size > READ_MAX:
        raise _too_large(path, answer.size)
    try:
        return base64.b64decode(answer.content, validate=True)
    except binascii.Error as error:
        raise _garbled() from error


async def write(sandbox: ToolSandbox, path: str, data: bytes) -> int:
    """Replace a whole file and create its directories. Return its size in bytes. Raise as
    `read`."""
    if (below := _below_tmp(sandbox, path)) is None:
        try:
            return await sandbox.files.write(path, data)
        except InvalidPath as error:
            raise _explained(path, error) from error
    if len(data) > _TMP_WRITE_MAX:
        raise TooLarge(
            f"{len(data)} bytes are more than the limit of {_TMP_WRITE_MAX} for a file in {TMP}",
            code="file_too_large",
            hint="write it below /workspace, and copy it with code",
            details={"limit": _TMP_WRITE_MAX},
        )
    content = base64.b64encode(data).decode()
    await _inside(sandbox, act="write", path=below, content=content)
    return len(data)


async def listed(sandbox: ToolSandbox, path: str, pattern: str, most: int) -> Listing:
    """Return the entries of a directory. With a pattern other than `*`, return the matching entries
    there and below. Return at most `most` entries. Raise as `read`, and BadRequest
    `invalid_pattern`."""
    if (below := _below_tmp(sandbox, path)) is None:
        try:
            if pattern != "*":
                return await sandbox.files.find(pattern, path, max_results=most)
            return _first(await sandbox.files.list(path), most)
        except InvalidPath as error:
            raise _explained(path, error) from error
    answer = await _inside(sandbox, act="list", path=below, pattern=pattern, most=most)
    listing = Listing(
        FileEntry(posixpath.basename(entry.path), entry.path, entry.kind, entry.size, 0.0)
        for entry in answer.entries[:most]
    )
    listing.complete = answer.complete
    return listing


def _first(listing: Listing, limit: int) -> Listing:
    if len(listing) <= limit:
        return listing
    first = Listing(listing[:limit])
    first.complete = False
    return first


def _below_tmp(sandbox: ToolSandbox, path: str) -> str | None:
    """Return a path below /tmp without `.` and `..`, or None for any other path. Raise InvalidPath
    for a path that begins there and leaves it."""
    if not is_sandboxed(sandbox):
        return None
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or parts[:1] != ["tmp"]:
        return None
    if any(char < " " or char == "\x7f" for char in path):
        raise _invalid("control_character", "the path contains a control character")
    folded = posixpath.normpath("/" + "/".join(parts))
    if folded != TMP and not folded.startswith(f"{TMP}/"):
        raise _invalid("path_traversal", f"'{path}' climbs out of {TMP}")
    return folded


# -- reaching /tmp ---------------------------------------------------------------------------------


class _FoundEntry(msgspec.Struct, frozen=True):
    path: str
    kind: Kind
    size: int | None


class _Answer(msgspec.Struct, frozen=True):
    """The answer of the program. Code inside may have forged it, so its types are checked. It is
    used only as the content of files, never as a path."""

    error: str | None = None
    errno: int | None = None
    size: int = 0
    content: str = ""
    entries: tuple[_FoundEntry, ...] = ()
    complete: bool = True


async def _inside(sandbox: ToolSandbox, **fields: Any) -> _Answer:
    """Send one request to the program inside. Raise its error."""
    request = base64.b64encode(json.dumps(fields).encode()).decode()
    program = f'{_program()}\n\nmain("{request}")\n'
    try:
        async with asyncio.timeout(_TURN_S):
            run = await _run(sandbox, program)
    except TimeoutError:
        raise Conflict(
            f"{TMP} could not be reached: other code was running the whole time",
            code="busy",
            hint="interrupt the running code, or use a file below /workspace",
        ) from None
    return _answer(run, str(fields["path"]))


async def _run(sandbox: ToolSandbox, program: str) -> Run:
    if not in_project(sandbox) or commands_allowed(sandbox):
        try:
            return await followed(sandbox, _start_program(sandbox, program))
        except SbxError as error:
            if error.code not in _NO_COMMANDS:
                raise
    # Use no global name: the user's code may have assigned another value to it.
    cell = f"(lambda: 0).__builtins__['exec']({program!r}, {{'__name__': 'tmp_files'}})"
    return await followed(sandbox, sandbox.start_run(cell, timeout=_WORK_S))


def _start_program(sandbox: ToolSandbox, program: str) -> ToolRun:
    command = f"exec python3 -I - <<'END-OF-PROGRAM'\n{program}END-OF-PROGRAM\n"
    if len(command) <= _COMMAND_MAX:
        return sandbox.start_shell(command, timeout=_WORK_S)
    return sandbox.start_script(command, "bash", timeout=_WORK_S)


@cache
def _program() -> str:
    return resources.files("sbx.guest.tools").joinpath("tmp_files.py").read_text(encoding="utf-8")


def _answer(run: Run, path: str) -> _Answer:
    line = run.stdout.strip().rpartition("\n")[2]
    if not run.ok or not line:
        why = run.error.value if run.error is not None else run.stderr
        raise Conflict(
            f"{TMP} could not be reached: {why.strip()[-300:] or run.status.value}",
            code="tmp_unreachable",
            hint="use a file below /workspace",
        )
    try:
        answer = msgspec.json.decode(line, type=_Answer)
    except msgspec.MsgspecError as error:
        raise _garbled() from error
    if answer.error is not None:
        raise _refused(path, answer)
    return answer


def _refused(path: str, answer: _Answer) -> SbxError:
    sentence = f"'{path}': {(answer.error or '')[:300]}"
    match answer.errno:
        case 2:  # ENOENT
            hint = "list its directory to see its files"
            return NotFound(f"'{path}' does not exist", code="file_not_found", hint=hint)
        case 1 | 13:  # EPERM, EACCES
            return Denied(sentence, code="file_not_permitted")
    return InvalidPath(sentence, hint="list its directory to see its files")


def _explained(path: str, error: InvalidPath) -> InvalidPath:
    """Add the valid paths to the refusal of a path that tools cannot access."""
    if error.details.get("reason") != "absolute_path":
        return error
    return _invalid("absolute_path", f"'{path:.500}' is not a path that tools can reach")


def _invalid(reason: str, sentence: str) -> InvalidPath:
    return InvalidPath(
        sentence,
        hint=f"name it relative to /workspace, or below /workspace or {TMP}",
        details={"field": "path", "reason": reason},
    )


def _too_large(path: str, size: int) -> TooLarge:
    return TooLarge(
        f"'{path}' has {size} bytes, and this tool reads at most {READ_MAX}",
        code="file_too_large",
        hint="read a part of it with code, or with head, tail, sed or grep",
        details={"limit": READ_MAX, "size": size},
    )


def _garbled() -> Broken:
    return Broken(f"the answer from {TMP} is invalid", code="tmp_unreachable")
