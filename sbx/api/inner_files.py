"""Files at any path inside, for SDKs whose users write to /tmp as well as to the workspace.

A short program inside does the work (sbx/guest/tools/file_calls.py), with the rights and the view
of the user's code. What it answers may be forged by that code: its types and sizes are checked
here, and no path of it is used on the host.

The content of a file in the workspace does not take this way: the host reads and writes it.
"""

import base64
import binascii
import errno
import posixpath
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Annotated, Any

import msgspec

from sbx.api.encoding import encoded_form
from sbx.errors import Broken, Conflict, Denied, InvalidPath, NotFound, SbxError, Unavailable
from sbx.isolation.launch_plan import GUEST
from sbx.protocol.files import Kind
from sbx.runtime.conversation import Conversation

PIECE = 3 << 20  # bytes of one request or answer
_COMMAND = f"exec python3 -I -S {GUEST}/sbx/guest/tools/file_calls.py"
_WORK_S = 60.0
_LATEST = 253_402_300_799.0
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Time = Annotated[float, msgspec.Meta(ge=-_LATEST / 5, le=_LATEST)]
_Name = Annotated[str, msgspec.Meta(max_length=300)]


class InnerEntry(msgspec.Struct, frozen=True):
    """One file or directory. Times in seconds of the epoch, `mode` as of chmod(2). `target`,
    `target_kind` and `target_mode` are of a symlink; `attributes` are extended ones of the
    user."""

    path: Annotated[str, msgspec.Meta(max_length=20_000)]
    kind: Kind
    size: _Size
    modified_s: _Time
    created_s: _Time
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
    owner: _Name
    group: _Name
    target: Annotated[str, msgspec.Meta(max_length=20_000)] | None = None
    target_kind: Kind | None = None
    target_mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)] | None = None
    attributes: dict[str, str] = {}


class InnerAnswer(msgspec.Struct, frozen=True):
    """The answer to one request; only the fields of its act are set."""

    error: Annotated[str, msgspec.Meta(max_length=2000)] | None = None
    errno: int = 0
    entries: tuple[msgspec.Raw, ...] = ()
    complete: bool = True
    size: _Size = 0
    content: str = ""
    count: _Size = 0
    is_new: bool = True
    was_there: bool = True

    def each_entry(self) -> Iterator[InnerEntry]:
        """Decode the entries one by one: 20,000 at once take 50 ms. Raise Conflict."""
        for raw in self.entries:
            try:
                yield _ENTRY.decode(raw)
            except msgspec.MsgspecError as error:
                raise _unreachable("an entry is not valid") from error

    @property
    def entry(self) -> InnerEntry:
        """Return the only entry. Raise Conflict."""
        for entry in self.each_entry():
            return entry
        raise _unreachable("an entry is missing")


_ENTRY = msgspec.json.Decoder(InnerEntry)
_ANSWERS = msgspec.json.Decoder(list[InnerAnswer])


class InnerFiles:
    """The files that the code of a conversation sees. Paths are absolute, `~` or relative to the
    workspace."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    async def call(self, *requests: dict[str, Any]) -> list[InnerAnswer]:
        """Do these requests in order. Raise the first failure, with the path of its request."""
        encoded = b"[%b]" % b",".join([await encoded_form(each) for each in requests])
        live = self._conversation.start_shell(
            _COMMAND, timeout=_WORK_S, stdin=encoded.decode("ascii")
        )
        run = await live.result()
        try:
            answers = _ANSWERS.decode(run.stdout)
        except msgspec.MsgspecError as error:
            reason = run.error.value if run.error is not None else run.stderr.strip()[-300:]
            raise _unreachable(reason or run.status.value) from error
        for request, answer in zip(requests, answers, strict=False):
            if answer.error is not None:
                raise _refused(str(request.get("path") or request.get("source")), answer)
        if len(answers) != len(requests):
            raise Broken("the program for files inside left a request out")
        return answers

    async def stat(self, path: str) -> InnerEntry:
        return (await self.call({"act": "stat", "path": path}))[0].entry

    async def pieces(self, path: str, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file from `start` to `end`, or to its end if it shrinks."""
        while start < end:
            (answer,) = await self.call(
                {"act": "read", "path": path, "offset": start, "length": min(PIECE, end - start)}
            )
            content = _bytes(answer.content)
            if not content:
                return
            start += len(content)
            yield content

    async def write(self, path: str, chunks: AsyncIterator[bytes]) -> int:
        """Replace a file in one step, and create its directories. Return its size in bytes."""
        part = f".{secrets.token_hex(8)}.part"
        size, rest, first = 0, b"", True

        async def send(content: bytes, *, last: bool) -> None:
            text = base64.b64encode(content).decode()
            request = {"act": "write", "path": path, "content": text, "part": part}
            await self.call({**request, "first": first, "last": last})

        async for chunk in chunks:
            rest += chunk
            size += len(chunk)
            while len(rest) > PIECE:
                await send(rest[:PIECE], last=False)
                rest, first = rest[PIECE:], False
        await send(rest, last=True)
        return size


def inner_path(path: str) -> str:
    """Return a path as the program inside takes it: absolute. Raise InvalidPath."""
    if not path or "\0" in path:
        raise InvalidPath("a path is empty or has a NUL character")
    if path == "~" or path.startswith("~/"):
        path = f"/workspace{path[1:]}"
    return posixpath.normpath(posixpath.join("/workspace", path))


def is_in_workspace(path: str) -> bool:
    """Return whether the host itself can read and write the file at this path of `inner_path`."""
    return path.startswith("/workspace/")


def _unreachable(reason: str) -> Conflict:
    return Conflict(f"the files inside could not be reached: {reason}", code="files_unreachable")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Conflict("the file could not be read", code="files_unreachable") from error


def _refused(path: str, answer: InnerAnswer) -> SbxError:
    message = f"{path}: {answer.error}"
    match answer.errno:
        case errno.ENOENT:
            return NotFound(message, code="file_not_found")
        case errno.EEXIST:
            return Conflict(message, code="file_exists")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return Denied(message, code="file_not_permitted")
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return Unavailable(message, code="no_space")
        case _:
            return InvalidPath(message)
