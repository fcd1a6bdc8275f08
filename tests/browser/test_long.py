"""A page that stays open: while its service is killed, without a network, and for half an hour."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import BrowserContext, Page, expect

from sbx.client import Client
from sbx.errors import SbxError
from tests.browser.conftest import Desk

pytestmark = pytest.mark.timeout(240)
STEP_MS = 20_000
HALF_AN_HOUR_MS = 1_800_000


@asynccontextmanager
async def served(place: Path, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`sbx serve` in a process, once it answers. It is killed at the end."""
    words = ["serve", "--socket", str(place / "sbx.sock"), "--data-dir", str(place / "data")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sbx", *words, "--console", address),
        env={**os.environ, "SBX_LOG_LEVEL": "error"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60), Client(place / "sbx.sock") as client:
            while True:
                try:
                    await client.health()
                    break
                except SbxError:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_service_comes_back_without_a_reload(
    context: BrowserContext, place: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with served(place, address), Client(place / "sbx.sock") as client:
        code = await client.make_login_code()
        box = (await client.create()).id
        page = await context.new_page()
        await page.goto(f"{code['url']}/console/sandboxes#login={code['code']}")
        await expect(page.get_by_role("link", name=box)).to_be_visible()
    connection = page.get_by_role("status", name="Connection")
    await expect(connection).to_have_text("Reconnecting…")
    await expect(page.get_by_role("link", name=box)).to_be_visible()  # the last known state
    async with served(place, address), Client(place / "sbx.sock") as client:
        await expect(connection).to_have_text("Connected")  # the login is in the store
        await expect(page.get_by_role("link", name=box)).to_have_count(1)
        other = (await client.create()).id
        await expect(page.get_by_role("link", name=other)).to_be_visible()
        await client.delete(box)
        await expect(page.get_by_role("link", name=box)).to_have_count(0)
        await page.close()


@pytest.mark.full_tier
async def test_a_silent_network_is_noticed(
    desk: Desk, page: Page, context: BrowserContext, client: Any
) -> None:
    """As after the sleep of a laptop: no packet comes, and the connection is not closed."""
    await page.get_by_role("link", name="Sandboxes").click()
    devtools = await context.new_cdp_session(page)
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    await devtools.send("Network.enable")
    await devtools.send("Network.emulateNetworkConditions", offline)
    connection = page.get_by_role("status", name="Connection")
    await expect(connection).to_have_text("Reconnecting…", timeout=90_000)
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    await devtools.send("Network.emulateNetworkConditions", {**offline, "offline": False})
    await expect(connection).to_have_text("Connected", timeout=60_000)
    await expect(page.get_by_role("link", name=box)).to_have_count(1)
    await client.delete(f"/v1/sandboxes/{box}")


@pytest.mark.full_tier
async def test_half_an_hour_takes_no_more_memory(
    desk: Desk, context: BrowserContext, client: Any
) -> None:
    """By a clock that is moved on. The page connects again each time that it hears nothing."""
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    await client.post(f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": "1"})
    await context.clock.install()
    page = await desk.opened(context, f"/console/sandboxes/{box}")
    devtools = await context.new_cdp_session(page)

    async def used() -> int:
        await devtools.send("HeapProfiler.collectGarbage")
        heap = await devtools.send("Runtime.getHeapUsage")
        return int(heap["usedSize"])

    async def pass_time(total_ms: int) -> None:
        for _ in range(total_ms // STEP_MS):
            await context.clock.run_for(STEP_MS)
        await expect(page.get_by_role("status", name="Connection")).to_have_text("Connected")

    await pass_time(HALF_AN_HOUR_MS // 6)
    before = await used()
    await pass_time(HALF_AN_HOUR_MS)
    assert await used() < before * 1.2
    sandbox = desk.console.served.service.sandboxes.index.by_id(box)
    assert sandbox is not None
    assert sandbox.users == 0
    await client.delete(f"/v1/sandboxes/{box}")
