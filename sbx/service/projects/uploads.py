"""The uploads of a conversation, as it sees them in a project: at /uploads, whoever keeps them.

They belong to the conversation of a kept sandbox. Where its jails have the same uid as those of the
project, its directory is mounted; else (as root, where each has one of its own) they are copied.
"""

import asyncio
from collections.abc import AsyncIterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from sbx.protocol.files import Upload
from sbx.runtime.files.files import WorkspaceUploads
from sbx.workspace import UploadLimits


class UploadCopies(Protocol):
    """Where they are copied to."""

    async def put_stream(
        self, name: str, chunks: AsyncIterable[bytes], limits: UploadLimits | None = None
    ) -> Upload: ...
    async def list(self) -> Sequence[Upload]: ...
    async def delete(self, name: str) -> None: ...


class ProjectUploads:
    """`theirs` are those that are kept, `copies` where they are copied to, if they are. `view` is
    where code sees them."""

    def __init__(
        self,
        theirs: WorkspaceUploads,
        copies: UploadCopies | None = None,
        *,
        view: str,
    ) -> None:
        self._theirs = theirs
        self._copies = copies
        self._view = view
        self._copying = asyncio.Lock()

    async def put(self, path: str | Path, name: str | None = None) -> Upload:
        """Raises as `WorkspaceUploads.put`, whose limits these are."""
        return await self._shown(await self._theirs.put(path, name))

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        return await self._shown(await self._theirs.put_bytes(name, content))

    async def list(self) -> tuple[Upload, ...]:
        return tuple(self._told(one) for one in await self._theirs.list())

    async def refresh(self) -> None:
        """Make the copies what the kept ones are now."""
        if self._copies is None:
            return
        async with self._copying:
            there = {(one.name, one.sha256) for one in await self._copies.list()}
            wanted = {(one.name, one.sha256) for one in await self._theirs.list()}
            for name, _ in wanted - there:
                await self._copy(self._copies, name)
            for name in {name for name, _ in there} - {name for name, _ in wanted}:
                await self._copies.delete(name)

    async def _copy(self, copies: UploadCopies, name: str) -> None:
        async with (
            await self._theirs.open_stream(name) as stream,
            aclosing(stream.chunks()) as chunks,
        ):
            await copies.put_stream(name, chunks, UploadLimits())

    async def _shown(self, upload: Upload) -> Upload:
        await self.refresh()
        return self._told(upload)

    def _told(self, upload: Upload) -> Upload:
        return replace(upload, path=f"{self._view}/{upload.name}")
