"""The paths that code sees, and who reaches them.

    /workspace/…, relative, /uploads/…    the sandbox's files, by their own rules
    /tmp/…                                the jail's own tmpfs: a small program, run inside

The program (sbx/guest/tmp_files.py) gets what it is to do as base64, which no quoting of bash or
Python can be broken out of. It runs beside the kernel and shares nothing with the user's code but
the files. Where commands may not run, or run in another jail than cells, it is a cell: names of the
user's are neither read nor left behind, and it waits its turn.
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

from sbx.agent.sandbox import InProject, LiveRun, Sandbox
from sbx.agent.tools.following import followed
from sbx.errors import Broken, Conflict, Denied, InvalidPath, NotFound, SbxError, TooLarge
from sbx.protocol.files import Entry, Kind, Listing
from sbx.protocol.runs import Run

TMP = "/tmp"  # noqa: S108  # the jail's own, a fresh tmpfs
READ_MAX = 8 << 20  # bytes of a file that a tool reads
_TMP_WRITE_MAX = 4 << 20  # bytes; they travel as code, as base64 in a literal
_COMMAND_MAX = 100_000  # characters; a longer one is a script, which lies in /tmp meanwhile
_WORK_S = 20.0
_TURN_S = 120.0  # with the wait for a cell that runs
_NO_COMMANDS = ("processes_denied", "capability_not_supported", "language_unavailable")


async def read(sandbox: Sandbox, path: str) -> bytes:
    """All bytes of a file of at most READ_MAX. Raises InvalidPath, NotFound, TooLarge, Denied."""
    if (below := _below_tmp(sandbox, path)) is None:
        try:
            entry = await sandbox.files.stat(path)
            if entry.size is not None and entry.size > READ_MAX:
                raise _too_large(path, entry.size)
            return await sandbox.files.read_bytes(path)
        except InvalidPath as error:
            raise _explained(path, error) from error
    found = await _inside(sandbox, act="read", path=below, most=READ_MAX)
    if found.size > READ_MAX:
        raise _too_large(path, found.size)
    try:
        return base64.b64decode(found.content, validate=True)
    except binascii.Error as error:
        raise _garbled() from error


async def write(sandbox: Sandbox, path: str, data: bytes) -> int:
    """Replace a file whole, with the directories it needs; its size in bytes. Raises as `read`."""
    if (below := _below_tmp(sandbox, path)) is None:
        try:
            return await sandbox.files.write(path, data)
        except InvalidPath as error:
            raise _explained(path, error) from error
    if len(data) > _TMP_WRITE_MAX:
        raise TooLarge(
            f"{len(data)} bytes are more than the limit of {_TMP_WRITE_MAX} for a file in {TMP}",
            code="file_too_large",
            hint="write it below /workspace, and have code copy it",
            details={"limit": _TMP_WRITE_MAX},
        )
    content = base64.b64encode(data).decode()
    await _inside(sandbox, act="write", path=below, content=content)
    return len(data)


async def listed(sandbox: Sandbox, path: str, pattern: str, most: int) -> Listing:
    """What lies in a directory; with another pattern than `*` what matches it there and below. At
    most `most` entries. Raises as `read`, and BadRequest `invalid_pattern`."""
    if (below := _below_tmp(sandbox, path)) is None:
        try:
            if pattern != "*":
                return await sandbox.files.find(pattern, path, max_results=most)
            return _first(await sandbox.files.list(path), most)
        except InvalidPath as error:
            raise _explained(path, error) from error
    told = await _inside(sandbox, act="list", path=below, pattern=pattern, most=most)
    listing = Listing(
        Entry(posixpath.basename(one.path), one.path, one.kind, one.size, 0.0)
        for one in told.entries[:most]
    )
    listing.complete = told.complete
    return listing


def _first(listing: Listing, most: int) -> Listing:
    if len(listing) <= most:
        return listing
    first = Listing(listing[:most])
    first.complete = False
    return first


def _below_tmp(sandbox: Sandbox, path: str) -> str | None:
    """The path if it is one of /tmp's, without `.` and `..`; None where it is not. Raises
    InvalidPath for one that begins there and climbs out."""
    if isinstance(sandbox, InProject) and not sandbox.sandboxed:
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


class _Found(msgspec.Struct, frozen=True):
    path: str
    kind: Kind
    size: int | None


class _Told(msgspec.Struct, frozen=True):
    """The answer, which code inside may have forged: its types are checked, and it is used as the
    content of files only, never as a path."""

    error: str | None = None
    errno: int | None = None
    size: int = 0
    content: str = ""
    entries: tuple[_Found, ...] = ()
    complete: bool = True


async def _inside(sandbox: Sandbox, **asked: Any) -> _Told:
    """Have one thing done inside. Raises what became of it."""
    request = base64.b64encode(json.dumps(asked).encode()).decode()
    program = f'{_program()}\n\nmain("{request}")\n'
    try:
        async with asyncio.timeout(_TURN_S):
            run = await _run(sandbox, program)
    except TimeoutError:
        raise Conflict(
            f"{TMP} could not be reached: other code has run all the while",
            code="busy",
            hint="interrupt what runs, or use a file below /workspace",
        ) from None
    return _answer(run, str(asked["path"]))


async def _run(sandbox: Sandbox, program: str) -> Run:
    if not isinstance(sandbox, InProject) or sandbox.commands_allowed:
        try:
            return await followed(sandbox, _beside(sandbox, program))
        except SbxError as error:
            if error.code not in _NO_COMMANDS:
                raise
    # Without a name: the user's code may have given it to something else.
    cell = f"(lambda: 0).__builtins__['exec']({program!r}, {{'__name__': 'tmp_files'}})"
    return await followed(sandbox, sandbox.start_run(cell, timeout=_WORK_S))


def _beside(sandbox: Sandbox, program: str) -> LiveRun:
    command = f"exec python3 -I - <<'END-OF-PROGRAM'\n{program}END-OF-PROGRAM\n"
    if len(command) <= _COMMAND_MAX:
        return sandbox.start_shell(command, timeout=_WORK_S)
    return sandbox.start_script(command, "bash", timeout=_WORK_S)


@cache
def _program() -> str:
    return resources.files("sbx.guest").joinpath("tmp_files.py").read_text(encoding="utf-8")


def _answer(run: Run, path: str) -> _Told:
    line = run.stdout.strip().rpartition("\n")[2]
    if not run.ok or not line:
        why = run.error.value if run.error is not None else run.stderr
        raise Conflict(
            f"{TMP} could not be reached: {why.strip()[-300:] or run.status.value}",
            code="tmp_unreachable",
            hint="use a file below /workspace",
        )
    try:
        told = msgspec.json.decode(line, type=_Told)
    except msgspec.MsgspecError as error:
        raise _garbled() from error
    if told.error is not None:
        raise _refused(path, told)
    return told


def _refused(path: str, told: _Told) -> SbxError:
    sentence = f"'{path}': {(told.error or '')[:300]}"
    match told.errno:
        case 2:  # ENOENT
            hint = "list its directory to see what is there"
            return NotFound(f"there is no '{path}'", code="file_not_found", hint=hint)
        case 1 | 13:  # EPERM, EACCES
            return Denied(sentence, code="file_not_permitted")
    return InvalidPath(sentence, hint="list its directory to see what is there")


def _explained(path: str, error: InvalidPath) -> InvalidPath:
    """The refusal of a path that is none of ours says which would be."""
    if error.details.get("reason") != "absolute_path":
        return error
    return _invalid("absolute_path", f"'{path:.500}' is no path that tools can reach")


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
        hint="read the part that matters by code, or with head, tail, sed or grep",
        details={"limit": READ_MAX, "size": size},
    )


def _garbled() -> Broken:
    return Broken(f"the answer from {TMP} was garbled", code="tmp_unreachable")
