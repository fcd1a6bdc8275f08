"""A large file up and down again: the process stays as small as it was."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import psutil
import pytest
from live_app import live
from places import short_directory
from sessions_calls import new_session, url

from tests.tiers import rows

SIZE = 300 << 20
MOST = 48 << 20  # bytes that the process may grow by, client and service together
CHUNK = bytes(1 << 20)

POLICY = """
schema = 1
extends = "default"
[uploads]
max_file_size = "400MiB"
"""


class Watch:
    """The largest the process was, seen a hundred times a second."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.before = self.most = self._now()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self.most = max(self.most, self._now())
            await asyncio.sleep(0.01)

    def _now(self) -> int:
        return int(self._process.memory_info().rss)

    async def end(self) -> int:
        self._task.cancel()
        await asyncio.wait([self._task])
        return self.most - self.before


async def form(file_first: bool) -> AsyncIterator[bytes]:
    field = b'--B\r\nContent-Disposition: form-data; name="conversation_id"\r\n\r\nc1\r\n'
    if not file_first:
        yield field
    yield b'--B\r\nContent-Disposition: form-data; name="file"; filename="big.bin"\r\n\r\n'
    for _ in range(SIZE // len(CHUNK)):
        yield CHUNK
    yield b"\r\n" + (field if file_first else b"") + b"--B--\r\n"


@pytest.mark.full_tier
@pytest.mark.parametrize("file_first", rows([False, True], ci_tier=[False]))
async def test_three_hundred_megabytes_leave_memory_flat(file_first: bool) -> None:
    with short_directory() as directory:
        policies = directory / "policies"
        policies.mkdir()
        (policies / "roomy.toml").write_text(POLICY)
        async with (
            live(
                directory,
                policy_dirs=(policies,),
                sessions_policy="roomy",
                sessions_upload_size=SIZE,
                sessions_upload_types=("bin",),
            ) as served,
            served.client() as client,
        ):
            session = await new_session(client)
            watch = Watch()
            made = await client.post(
                url(session, "/files/upload"),
                content=form(file_first),
                headers={"content-type": "multipart/form-data; boundary=B"},
            )
            assert made.status_code == 201, made.text
            assert await watch.end() < MOST
            expected = hashlib.sha256()
            for _ in range(SIZE // len(CHUNK)):
                expected.update(CHUNK)
            assert made.json()["sha256"] == expected.hexdigest()
            if file_first:
                return
            watch = Watch()
            found, size = hashlib.sha256(), 0
            async with client.stream("GET", url(session, "/files/big.bin")) as down:
                assert down.headers["content-length"] == str(SIZE)
                async for chunk in down.aiter_raw():
                    found.update(chunk)
                    size += len(chunk)
            assert (size, found.hexdigest()) == (SIZE, expected.hexdigest())
            assert await watch.end() < MOST
