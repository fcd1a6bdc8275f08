"""Copy files and directories from one sandbox of a service to another for `sbx cp`.

The content passes through this process in pieces, and nothing of it is written to this host. The
service checks each of the two requests. A directory is packed inside of the one sandbox and
unpacked inside of the other, so that its entries stay inside of walls.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbx.client.conversation import RemoteConversation

OnProgress = Callable[[int, int | None], None]


async def copy_file(
    source: "RemoteConversation",
    path: str,
    target: "RemoteConversation",
    to: str,
    upload: str | None,
    on_progress: OnProgress,
) -> int:
    """Copy a file to `to`, or to the upload of this name. Return its size in bytes. A failed or
    cancelled call leaves the old file."""
    async with source.files.open_stream(path) as reply:
        pieces = _counted(reply.chunks(), reply.size, on_progress)
        async with aclosing(pieces):
            if upload is not None:
                return (await target.uploads.put_stream(upload, pieces, size=reply.size)).size
            return await target.files.write_stream(to, pieces, size=reply.size)


async def copy_tree(
    source: "RemoteConversation",
    path: str,
    target: "RemoteConversation",
    to: str,
    on_progress: OnProgress,
) -> tuple[int, int]:
    """Copy the content of a directory into `to`. Return the bytes of its files, and the number of
    entries that were left out. If the call fails, the files that were unpacked before stay. Raise
    the errors of `archive` and `unpack`."""
    async with (
        aclosing(source.files.archive(path)) as packed,
        aclosing(_counted(packed, None, on_progress)) as pieces,
    ):
        done = await target.files.unpack(pieces, to)
    return done.bytes, done.skipped


async def _counted(
    pieces: AsyncIterable[bytes], size: int | None, on_progress: OnProgress
) -> AsyncGenerator[bytes, None]:
    done = 0
    async for piece in pieces:
        done += len(piece)
        on_progress(done, size)
        yield piece
