"""What the command that packs and unpacks may say; whatever else it says ends it."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sbx.errors import Conflict, TooLarge
from sbx.kernels import frames
from sbx.policy import load
from sbx.runtime.files.archives import Archives

_BLOCK = 48 * 1024
_WHOLE = base64.b64encode(bytes(_BLOCK)).decode()
_END = '{"entries": 1, "bytes": 2, "skipped": 3}'


class _Command:
    """One that says `lines`, and then waits for ever."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = iter(lines)
        self.fed: list[str] = []
        self.ended = False

    async def next(self) -> Any:
        for line in self._lines:
            return frames.OutputFrame("stdout", f"{line}\n")
        return await asyncio.Event().wait()

    async def took(self, size: int) -> None:
        pass

    async def write(self, text: str) -> None:
        self.fed.append(text)

    async def signal(self, number: int) -> None:
        self.ended = True


def archives(*lines: str) -> tuple[Archives, _Command]:
    command = _Command(list(lines))

    async def spawn(*words: Any, **more: Any) -> _Command:
        return command

    kernel = SimpleNamespace(
        spawn=spawn, jail=SimpleNamespace(plan=SimpleNamespace(command=("python",)))
    )

    @asynccontextmanager
    async def beside() -> AsyncIterator[Any]:
        yield kernel

    return Archives(load("default"), cast("Any", beside)), command


async def packed(*lines: str) -> list[int]:
    made, command = archives(*lines)
    try:
        async with asyncio.timeout(60):
            return [len(piece) async for piece in made.pack("/workspace", "tar.gz")]
    finally:
        assert command.ended


async def test_blocks_are_whole_but_for_the_last() -> None:
    assert await packed(_WHOLE, _WHOLE, "QQ==", _END) == [_BLOCK, _BLOCK, 1]
    assert await packed(_WHOLE, _END) == [_BLOCK]


@pytest.mark.parametrize(
    "lines",
    [
        ("", "", ""),  # a flood of nothing
        ("QQ==", "QQ==", _END),
        (_WHOLE, "", _WHOLE),
        ("no base64!",),
        ("QUJD" * (1 << 16),),
        ("{",),
        ('{"entries": Infinity, "bytes": 0, "skipped": 0}',),
    ],
)
async def test_whatever_is_no_block_ends_it(lines: tuple[str, ...]) -> None:
    with pytest.raises(Conflict) as refused:
        await packed(*lines)
    assert refused.value.code == "archive_failed"


async def unpacked(*lines: str) -> tuple[Any, int]:
    made, command = archives(*lines)

    async def one_block() -> AsyncIterator[bytes]:
        yield bytes(_BLOCK)
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        return await made.unpack("/workspace", one_block()), len(command.fed)


async def test_what_it_counts_is_bounded() -> None:
    answer = '{"entries": 1e300, "bytes": -1, "skipped": 3}'
    done, _ = await unpacked("+", answer)
    assert (done.entries, done.bytes, done.skipped) == (1 << 53, 0, 3)


async def test_nothing_is_taken_that_was_not_sent() -> None:
    with pytest.raises(Conflict, match="not sent"):
        await unpacked("+", "+")


@pytest.mark.parametrize(
    ("limit", "details"),
    [
        ('"entries"', {"limit": 50_000, "limit_name": "entries"}),
        ('"file_bytes"', {"limit": 512 << 20, "limit_name": "file_bytes"}),
        ('"bytes"', {"limit": 1 << 30, "limit_name": "bytes"}),
        ('"<b>"', {"limit": 1 << 30, "limit_name": "bytes"}),
        ("[1]", {"limit": 1 << 30, "limit_name": "bytes"}),
    ],
)
async def test_only_the_name_of_a_limit_is_taken_from_inside(
    limit: str, details: dict[str, Any]
) -> None:
    with pytest.raises(TooLarge) as refused:
        await unpacked("+", f'{{"error": "too_large", "limit": {limit}}}')
    assert (refused.value.code, refused.value.details) == ("archive_too_large", details)
