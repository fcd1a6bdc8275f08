"""The watch of a limit never ends silently."""

import asyncio
from pathlib import Path

import pytest

from sbx.kernels import watch

PACKAGE = Path(watch.__file__).parents[1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_AGAIN_S", 0)


async def ends_after(failures: int) -> tuple[int, int]:
    """Return the number of looks and of ends, for a look that fails so often."""
    looks = ends = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        if looks <= failures:
            raise RuntimeError("a bug")

    async def end() -> None:
        nonlocal ends
        ends += 1

    await watch.keep_watching(look, end)
    return looks, ends


async def test_watch_looks_again_after_an_error() -> None:
    assert await ends_after(0) == (1, 0)
    assert await ends_after(4) == (5, 0)


async def test_kernels_end_if_their_watch_fails_again_and_again() -> None:
    assert await ends_after(5) == (5, 1)


async def test_rare_errors_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_IN_A_ROW_S", 0)
    assert await ends_after(20) == (21, 0)


async def test_cancelled_watch_ends_no_kernel() -> None:
    async def look() -> None:
        await asyncio.Event().wait()

    async def end() -> None:
        raise AssertionError("nothing failed")

    task = asyncio.create_task(watch.keep_watching(look, end))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "path",
    ["kernels/memory_watcher.py", "runtime/files/disk_limit.py", "runtime/run/context_kernel.py"],
)
def test_each_watch_of_a_limit_is_kept_alive(path: str) -> None:
    source = (PACKAGE / path).read_text()
    assert source.count("create_task(looking") == source.count("looking = keep_watching(") == 1
