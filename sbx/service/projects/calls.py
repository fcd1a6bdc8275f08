"""The requests of a service to its project server, and the frames on the socket between them.

The server has rights on the directories of users, and the service parses HTTP: every request is a
typed message, and the server checks each field before it acts. A frame is the length of its body in
four bytes, big-endian, and the body in MessagePack.

    Ping                               whether the server and its broker answer
    Resolve, Look, NamesIn             a directory, before it is a project
    Open, Allow, Close                 the sandbox of one conversation in a project
    ReadPolicy, AddGrant               the access that a person grants there
    ReadSurroundings                   the paths, languages and capabilities that a model is offered
    Begin, Compare, Commit, Rollback   the changes of one tool call
    ReadFile ... SaveResult            files of a sandbox, or of the copy that a tool call acts on
    Start, Follow, GiveUp              a run
    ListUploads ... EndUpload          copies of the uploads that the service keeps
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from sbx import errors
from sbx.protocol.dry_runs import FileChange
from sbx.protocol.files import FileEntry, Kind
from sbx.protocol.grants import Access, GrantDuration
from sbx.workspace.snapshots.manifest import FileNode, PlannedChange

FRAME_MAX = 1 << 30  # bytes: a file of the largest `file_size_max` that a shipped policy has
LENGTH = 4
Effect = Literal["write", "code", "command"]


class _Request(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A request. `of` is the number of an opened sandbox, or of the changes of a tool call."""


class Ping(_Request):
    """The answer is whether the broker of the server is alive."""


class Resolve(_Request):
    directory: str


class Look(_Request):
    directory: str


class NamesIn(_Request):
    """See `AllowedProjects.names_in`."""

    directory: str
    limit: int


class Open(_Request):
    directory: str
    policy: str
    narrower: dict[str, Any]
    env: dict[str, str]
    allowed: bool
    lost: bool


class Allow(_Request):
    of: int


class ReadPolicy(_Request):
    """The answer is the policy of the sandbox as JSON data."""

    of: int


class ReadSurroundings(_Request):
    of: int


class AddGrant(_Request):
    """See `Grants.grant`."""

    of: int
    access: Access
    duration: GrantDuration
    by: str


class Close(_Request):
    of: int


class Begin(_Request):
    of: int
    effect: Effect


class Compare(_Request):
    of: int


class Commit(_Request):
    of: int


class Rollback(_Request):
    of: int


class ReadFile(_Request):
    of: int
    path: str


class WriteFile(_Request):
    of: int
    path: str
    content: bytes


class ListFiles(_Request):
    of: int
    path: str
    max_depth: int


class Stat(_Request):
    of: int
    path: str


class MakeDirectory(_Request):
    of: int
    path: str


class Find(_Request):
    of: int
    pattern: str
    path: str
    kind: Kind | None
    max_results: int


class SaveResult(_Request):
    of: int
    name: str
    content: bytes


class StartCall(_Request):
    """A start. `language` is None for a cell, "" for a shell command. The reply is the number of
    the run."""

    of: int
    code: str
    language: str | None
    timeout: float | None
    cwd: str | None


class Follow(_Request):
    """The events of a run after the first `after`, as JSON, once there is one; none at its end."""

    of: int
    run: int
    after: Annotated[int, msgspec.Meta(ge=0)]


class GiveUp(_Request):
    of: int
    run: int


class ListUploads(_Request):
    of: int


class DeleteUpload(_Request):
    of: int
    name: str


class BeginUpload(_Request):
    """The answer is the number of the upload, within its sandbox."""

    of: int
    name: str


class AddToUpload(_Request):
    of: int
    upload: int
    chunk: bytes


class EndUpload(_Request):
    """`whole`: False drops the received part."""

    of: int
    upload: int
    whole: bool


Request = (
    Ping | Resolve | Look | NamesIn | Open | Allow | Close | Begin | Compare | Commit | Rollback
    | ReadPolicy | ReadSurroundings | AddGrant
    | ReadFile | WriteFile | ListFiles | Stat | MakeDirectory | Find | SaveResult
    | StartCall | Follow | GiveUp
    | ListUploads | DeleteUpload | BeginUpload | AddToUpload | EndUpload
)  # fmt: skip


class Call(msgspec.Struct, frozen=True, tag=True):
    id: int
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The service no longer waits for this call."""

    id: int


class CallReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`stateful`: whether Python in the sandbox of the request has, or had, variables. `grants` are
    the ids of the grants that are valid there, and `refused` the access that was refused since the
    last reply; None: its policy permits none. The reply with the number 0 reports that the server
    is ready, or why it is not."""

    id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: dict[str, Any] | None = None
    kind: str = ""
    stateful: bool = False
    grants: list[str] | None = None
    refused: list[Access] = []


class FoundReply(msgspec.Struct, frozen=True):
    entries: list[FileEntry]
    complete: bool


class Compared(msgspec.Struct, frozen=True):
    """`run` is JSON. `touched` has the path of each change, and the target of a new symlink."""

    run: bytes | None
    changes: list[FileChange]
    truncated: bool
    left_out: list[str]
    touched: list[tuple[bytes, bytes | None]]


def changes_of(pairs: Sequence[tuple[bytes, bytes | None]]) -> list[PlannedChange]:
    """Return the changes again, with the parts that `within` reads."""
    return [
        PlannedChange(
            os.fsdecode(path), None, FileNode("file" if text is None else "symlink", text=text)
        )
        for path, text in pairs
    ]


def touched(changes: Sequence[PlannedChange]) -> list[tuple[bytes, bytes | None]]:
    return [
        (os.fsencode(change.path), change.after.text if change.after is not None else None)
        for change in changes
    ]


# -- frames ------------------------------------------------------------------------------------

ENCODER = msgspec.msgpack.Encoder()
CALLS = msgspec.msgpack.Decoder(Call | Cancel)
REPLIES = msgspec.msgpack.Decoder(CallReply)


def framed(message: object) -> bytes:
    """Return a message as a frame. Raise TooLarge for a message that is too long for one."""
    body = ENCODER.encode(message)
    if len(body) > FRAME_MAX:
        raise errors.TooLarge(
            f"{len(body)} bytes at once are more than a call in a project may bring",
            code="too_large",
            hint="read or write the file in parts",
            details={"limit": FRAME_MAX},
        )
    return len(body).to_bytes(LENGTH) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the body of the next frame; None at the end. Raise ValueError for an invalid
    length."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH))
        if length > FRAME_MAX:
            raise ValueError(f"a frame of {length} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def error_of(error: errors.SbxError) -> dict[str, Any]:
    return {"error": error.to_dict(), "kind": errors.kind_of(error)}


def revived(reply: CallReply) -> errors.SbxError:
    """Return the error of a reply, as the class that a caller can catch."""
    error: Mapping[str, Any] = reply.error or {}
    return errors.KINDS.get(reply.kind, errors.Broken)(
        str(error.get("message", "the project server gave no reason")),
        code=str(error.get("code", "broken")),
        hint=error.get("hint"),
        details=error.get("details"),
    )
