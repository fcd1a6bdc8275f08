"""Copy a file from one sandbox to another, only by an explicit call.

The content passes through this process and reaches only the two sandboxes that the caller holds.
"""

from pathlib import PurePosixPath

from sbx.agent.sandbox import Conversations, ToolSandbox, one_of
from sbx.errors import BadRequest, TooLarge

HANDED_MAX = 64 << 20  # bytes


async def hand(
    source: ToolSandbox | Conversations,
    path: str,
    target: ToolSandbox | Conversations,
    to: str | None = None,
    *,
    max_bytes: int = HANDED_MAX,
) -> str:
    """Copy the file at `path` in `source` to `to` in `target`, and return that path. Without `to`
    the file keeps its name and goes to the working directory. An existing file is replaced.

    Raise TooLarge `file_too_large` above `max_bytes`, BadRequest `not_a_file`, and the errors of
    reading and writing. The size is checked before and after the read, because code in the sandbox
    may write to the file meanwhile.
    """
    source, target = one_of(source), one_of(target)
    entry = await source.files.stat(path)
    if entry.kind != "file":
        raise BadRequest(f"{path} is not a file but a {entry.kind}", code="not_a_file")
    _check(path, entry.size or 0, max_bytes)
    content = await source.files.read_bytes(path)
    _check(path, len(content), max_bytes)
    to = to or PurePosixPath(path).name
    await target.files.write(to, content)
    return to


def _check(path: str, size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(
            f"{path} has {size} bytes, and the limit for copies between sandboxes is {limit}",
            code="file_too_large",
            details={"limit": limit},
        )
