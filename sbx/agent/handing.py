"""A file from one sandbox to another: by an explicit call, and by nothing else.

Its bytes go through this process, and never further than two sandboxes that the caller holds.
"""

from pathlib import PurePosixPath

from sbx.agent.sandbox import Conversations, Sandbox, one_of
from sbx.errors import BadRequest, TooLarge

HANDED_MAX = 64 << 20  # bytes


async def hand(
    source: Sandbox | Conversations,
    path: str,
    target: Sandbox | Conversations,
    to: str | None = None,
    *,
    max_bytes: int = HANDED_MAX,
) -> str:
    """Copy the file at `path` of `source` to `to` of `target`, and return that; without `to` it has
    its name in the working directory there. What was there is replaced.

    Raises TooLarge `file_too_large` above `max_bytes`, BadRequest `not_a_file`, and what reading
    and writing raise. The size is looked at first, and again once the bytes are here: the code
    inside may write meanwhile.
    """
    source, target = one_of(source), one_of(target)
    entry = await source.files.stat(path)
    if entry.kind != "file":
        raise BadRequest(f"{path} is no file but a {entry.kind}", code="not_a_file")
    _check(path, entry.size or 0, max_bytes)
    content = await source.files.read_bytes(path)
    _check(path, len(content), max_bytes)
    to = to or PurePosixPath(path).name
    await target.files.write(to, content)
    return to


def _check(path: str, size: int, most: int) -> None:
    if size > most:
        raise TooLarge(
            f"{path} has {size} bytes, and a file that is handed over may have {most}",
            code="file_too_large",
            details={"limit": most},
        )
