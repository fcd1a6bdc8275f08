"""Resumable uploads of one conversation: created, sent in pieces, finished with a checksum of all.

    begin → id      append(id, offset, piece, checksum) → offset      finish(id, checksum)

A client that lost its connection asks `get` for the offset and continues there. Number, bytes and
time are bounded. The conversation forgets them when it is closed, and a start removes the rest that
a crash left.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, TypeVar, cast

from msgspec import Struct, field

from sbx import errors
from sbx.aio import long_call, run_to_completion
from sbx.policy import Policy
from sbx.protocol.files import PartialUpload
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.honeytokens import Honeytokens, reader_of
from sbx.workspace import resumable_uploads
from sbx.workspace.errors import too_large
from sbx.workspace.paths import check_name
from sbx.workspace.streams import ReceivedFile

T = TypeVar("T")

PARTIALS_MAX = 16
LIFETIME_S = 3600.0
_FINISHED_MAX = 64
_BUSY_S = 10.0  # in which a piece whose sender has gone is given up


class _Partial(Struct, eq=False):
    id: str
    path: str
    size: int
    name: str
    upload: bool
    offset: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)  # the object for the bytes before `offset`
    touched: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Finished(Struct, frozen=True):
    sha256: str
    upload: bool
    outcome: Any


class Partials:
    """The ones of a conversation. Every method but `begin` raises NotFound `upload_not_found`."""

    def __init__(
        self,
        opened: Callable[[], Awaitable[OpenFiles]],
        policy: Policy,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        self._opened = opened
        self._limits = policy.limits
        self._lifetime_s = lifetime_s
        self._partials: dict[str, _Partial] = {}
        self._finished: dict[str, _Finished] = {}  # for clients that lost the reply
        self._timer: asyncio.TimerHandle | None = None
        self._sweeping: set[asyncio.Task[None]] = set()
        self.honeytokens: Honeytokens | None = None

    async def begin(self, path: str, size: int, *, upload: bool = False) -> PartialUpload:
        """Begin one of `size` bytes for the file `path`, or with `upload` for an upload of that
        name. Raises InvalidPath, TooLarge `file_too_large`, `uploads_too_large`, Conflict
        `too_many_partials`."""
        opened = await self._opened()
        with opened.in_use():
            if upload:
                path = opened.files.view(f"uploads/temparea/{check_name(path)}")
            else:
                path = opened.files.view(path, changing=True)
            self._check(path, size, upload=upload)
            partial = _Partial(
                f"up-{secrets.token_hex(12)}", path, size, resumable_uploads.new_name(), upload
            )
            self._partials[partial.id] = partial  # before any wait: others count it
            try:
                await run_to_completion(
                    opened.call(lambda: resumable_uploads.make(opened.own.staging, partial.name))
                )
            except BaseException:
                await self._drop(partial, opened)
                raise
        self._arm()
        return self._told(partial)

    def get(self, id: str) -> PartialUpload:
        """How far it is."""
        return self._told(self._found(id))

    async def append(
        self, id: str, offset: int, sha256: str | None, chunks: AsyncIterable[bytes]
    ) -> PartialUpload:
        """Add a piece at `offset`, and check its SHA-256, if it is not None. All of it or nothing
        is kept.

        Raises Conflict `wrong_offset` (`details["offset"]` is the right one) and `upload_busy`,
        BadRequest `checksum_mismatch`, TooLarge `piece_too_large`.
        """
        partial = self._found(id)
        if sha256 is not None:
            resumable_uploads.check_sha256(sha256)
        await self._enter(partial)
        try:
            self._found(id)
            if offset != partial.offset:
                raise errors.Conflict(
                    f"the upload continues at {partial.offset}, not at {offset}",
                    code="wrong_offset",
                    hint="send the piece that begins there",
                    details={"offset": partial.offset},
                )
            opened = await self._opened()
            with opened.in_use():
                intake = resumable_uploads.appending(
                    *(opened.own.staging, partial.name, offset, partial.size),
                    *(sha256, partial.sha256),
                )
                appended = await opened.intakes.fill(opened, intake, chunks)
                partial.offset, partial.sha256 = appended
        finally:
            partial.touched = time.monotonic()
            partial.lock.release()
        return self._told(partial)

    async def finish(
        self, id: str, sha256: str, store: Callable[[OpenFiles, str, ReceivedFile], T]
    ) -> T:
        """Pass the whole file to `store`, with the path, in a worker thread. After a success
        forget all but the outcome, which a repeated call gets again. Raise Conflict
        `upload_incomplete`, BadRequest `checksum_mismatch`, and the errors of `store`."""
        resumable_uploads.check_sha256(sha256)
        if (done := self._finished.get(id)) is not None and done.sha256 == sha256:
            return cast("T", done.outcome)
        partial = self._found(id)
        await self._enter(partial)
        try:
            if (done := self._finished.get(id)) is not None and done.sha256 == sha256:
                return cast("T", done.outcome)
            self._found(id)
            if partial.offset != partial.size:
                raise errors.Conflict(
                    f"{partial.offset} of {partial.size} bytes are here",
                    code="upload_incomplete",
                    hint="send the rest first",
                    details={"offset": partial.offset},
                )
            if (actual := partial.sha256.hexdigest()) != sha256:
                raise resumable_uploads.checksum_mismatch("the upload", actual)
            opened = await self._opened()
            reader = await reader_of(self.honeytokens, "a file that came in")
            with opened.in_use():
                received = ReceivedFile(opened.own.staging, partial.name, sha256)

                def act() -> T:
                    if reader is not None:
                        reader.check(received.chunks())
                    return store(opened, partial.path, received)

                async with long_call():
                    outcome = await run_to_completion(opened.call(act))
                self._remember(id, _Finished(sha256, partial.upload, outcome))
                await self._drop(partial, opened)
            return outcome
        finally:
            partial.touched = time.monotonic()
            partial.lock.release()

    async def abort(self, id: str) -> None:
        """Forget it and its bytes."""
        partial = self._found(id)
        await self._enter(partial)
        try:
            opened = await self._opened()
            with opened.in_use():
                await self._drop(partial, opened)
        finally:
            partial.lock.release()

    async def close(self, opened: OpenFiles | None) -> None:
        """Forget all of them, and remove their data while the files are open."""
        if self._timer is not None:
            self._timer.cancel()
        for task in tuple(self._sweeping):
            task.cancel()
            await asyncio.wait([task])
        for partial in tuple(self._partials.values()):
            self._partials.pop(partial.id, None)
            if opened is not None:
                await self._remove(partial, opened)

    def is_upload(self, id: str) -> bool:
        if (done := self._finished.get(id)) is not None:
            return done.upload
        return self._found(id).upload

    def _remember(self, id: str, done: _Finished) -> None:
        if len(self._finished) >= _FINISHED_MAX:
            self._finished.pop(next(iter(self._finished)))
        self._finished[id] = done

    def _check(self, path: str, size: int, *, upload: bool) -> None:
        most = self._limits.workspace_max if upload else self._limits.file_size_max
        if size > most:
            raise too_large(path, most)
        if len(self._partials) >= PARTIALS_MAX:
            raise errors.Conflict(
                f"{PARTIALS_MAX} uploads are on their way in pieces already",
                code="too_many_partials",
                hint="finish one, or abort it",
                details={"limit": PARTIALS_MAX},
            )
        total = size + sum(upload.size for upload in self._partials.values())
        if total > max(most, self._limits.workspace_max):
            raise too_large(path, max(most, self._limits.workspace_max))

    def _found(self, id: str) -> _Partial:
        partial = self._partials.get(id)
        if partial is None:
            raise errors.NotFound(
                "there is no such upload on its way",
                code="upload_not_found",
                hint="it was finished, aborted or forgotten: begin it again",
            )
        return partial

    async def _enter(self, partial: _Partial) -> None:
        try:
            async with asyncio.timeout(_BUSY_S):
                await partial.lock.acquire()
        except TimeoutError:
            raise errors.Conflict(
                "another piece of this upload is on its way",
                code="upload_busy",
                hint="send one piece after the other",
            ) from None

    def _told(self, partial: _Partial) -> PartialUpload:
        left = self._lifetime_s - (time.monotonic() - partial.touched)
        return PartialUpload(
            partial.id,
            partial.path,
            partial.size,
            partial.offset,
            resumable_uploads.PIECE_MAX,
            round(max(0.0, left), 1),
        )

    async def _drop(self, partial: _Partial, opened: OpenFiles) -> None:
        self._partials.pop(partial.id, None)
        await self._remove(partial, opened)

    async def _remove(self, partial: _Partial, opened: OpenFiles) -> None:
        staging = opened.own.staging
        await run_to_completion(
            opened.call(lambda: resumable_uploads.remove(staging, partial.name))
        )

    # -- time --------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._timer is None and self._partials:
            self._timer = asyncio.get_running_loop().call_later(
                min(self._lifetime_s, 60.0), self._look
            )

    def _look(self) -> None:
        self._timer = None
        task = asyncio.create_task(self._sweep())
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)
        self._arm()

    async def _sweep(self) -> None:
        end = time.monotonic() - self._lifetime_s
        for partial in tuple(self._partials.values()):
            if partial.touched <= end and not partial.lock.locked():
                try:
                    opened = await self._opened()
                except errors.SbxError:
                    return
                with opened.in_use():
                    await self._drop(partial, opened)
