"""The console in Debian's Chromium: the time until it is usable, its frames, its answer to a key.

The baselines are plain pages of a similar content in the same browser.
"""

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from bench.serving import served
from sbx.client import Client
from sbx.errors import SbxError

_CHROMIUM = "/usr/bin/chromium"
_SIZE = {"width": 1280, "height": 860}
_MESSAGES = 2000
_SHOWN = 200  # messages that the page shows at once, until a person asks for more
_SANDBOXES = 200
_LINES = 1_000_000
_SCROLL_S = 2.0

# The time from the start of the navigation until the first frame in which a person can type.
_USABLE = """
new Promise((resolve) => {
  const look = () => {
    const box = document.querySelector("textarea");
    if (box && !box.disabled) requestAnimationFrame(() => resolve(performance.now()));
    else requestAnimationFrame(look);
  };
  look();
})
"""
# Scroll an element to its begin and back, and count the frames of a second.
_FRAMES = """
async ([selector, seconds]) => {
  const box = selector ? document.querySelector(selector) : document.scrollingElement;
  const most = box.scrollHeight - box.clientHeight;
  const began = performance.now();
  let frames = 0;
  for (;;) {
    const now = await new Promise(requestAnimationFrame);
    const part = (now - began) / (seconds * 1000);
    if (part >= 1) return (frames * 1000) / (now - began);
    box.scrollTop = most * Math.abs(1 - 2 * part);
    frames += 1;
  }
}
"""
# The time from a key until the frame with its effect was painted.
_KEYS = """
() => {
  window.painted = [];
  addEventListener("keydown", (event) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => window.painted.push(performance.now() - event.timeStamp);
    channel.port2.postMessage(0);
  }), true);
}
"""
_PAINTED = """
(before) => new Promise((resolve) => {
  const look = () => {
    if (window.painted.length > before) resolve(window.painted.at(-1));
    else requestAnimationFrame(look);
  };
  look();
})
"""
# The longest time between two frames, until `stop` is called.
_GAPS = """
() => {
  let last = performance.now();
  window.gap = 0;
  const look = (now) => {
    window.gap = Math.max(window.gap, now - last);
    last = now;
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}
"""
Page = Any  # of Playwright, which is imported only where a row needs it
Measure = Callable[[Client, Page, Page, int, Progress], Awaitable[Samples]]


@asynccontextmanager
async def _pages() -> AsyncIterator[tuple[Client, Page, Page]]:
    """A client, a page that is logged in, and an empty page of the same browser."""
    try:
        from playwright.async_api import async_playwright
    except ImportError as error:
        raise NotMeasured("it needs playwright, of the extra dev") from error
    if not os.path.exists(_CHROMIUM):  # noqa: ASYNC240  # once
        raise NotMeasured("it needs Debian's chromium")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with served(console=address) as client, async_playwright() as playwright:
        try:
            code = await client.make_login_code()
        except SbxError as error:
            raise NotMeasured(f"no login: {error.message}") from error
        browser = await playwright.chromium.launch(
            executable_path=_CHROMIUM, chromium_sandbox=False, args=["--disable-dev-shm-usage"]
        )
        context = await browser.new_context(viewport=_SIZE, locale="en-US")  # type: ignore[arg-type]  # a TypedDict
        page = await context.new_page()
        await page.goto(f"{code['url']}/console/#login={code['code']}")
        await page.wait_for_selector("textarea")
        yield client, page, await context.new_page()
        await browser.close()


async def _row(measure: Measure, rounds: int, progress: Progress) -> Samples:
    async with _pages() as (client, page, plain):
        return await measure(client, page, plain, rounds, progress)


async def _open(_: Client, page: Page, plain: Page, rounds: int, progress: Progress) -> Samples:
    origin = page.url.partition("/console/")[0]

    async def usable_ms() -> float:
        await page.goto(f"{origin}/console/", wait_until="commit")
        return float(await page.evaluate(_USABLE))

    async def plain_ms() -> float:
        await plain.goto(f"{origin}/console/static/icon.svg")
        timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
        return float(await plain.evaluate(timing))

    samples = await in_turn(rounds, usable_ms, plain_ms, progress)
    return Samples(*samples, "an SVG file of the same service")


async def _conversation(client: Client, page: Page) -> None:
    """Show a conversation of many messages."""
    texts = (
        "question",
        "an **answer** with `code`, a list:\n\n- one\n- two\n\n| a | b |\n|-|-|\n| 1 | 2 |",
    )
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": f"{number}: {texts[number % 2]}"}
        for number in range(_MESSAGES)
    ]
    path = "/api/v1/conversations/long/import?user_id=uid%3A0&agent_id=console"
    await client.request("POST", path, json={"format": 1, "messages": messages})
    await page.goto(f"{page.url.partition('/console/')[0]}/console/conversations/long")
    await page.get_by_text(f"{_MESSAGES - 1}: an").wait_for()
    for left in range(_MESSAGES - _SHOWN, 0, -_SHOWN):
        await page.get_by_role("button", name=f"Show earlier messages ({left})").click()
    await page.locator("article").nth(_MESSAGES - 1).wait_for()


async def _paragraphs(plain: Page, count: int) -> None:
    await plain.set_content("".join(f"<p>{number}: an answer</p>" for number in range(count)))


async def _scroll(
    client: Client, page: Page, plain: Page, rounds: int, progress: Progress
) -> Samples:
    await _conversation(client, page)
    await _paragraphs(plain, _MESSAGES)
    return await _frames(page, ".messages", plain, rounds, progress)


async def _list(
    client: Client, page: Page, plain: Page, rounds: int, progress: Progress
) -> Samples:
    for _ in range(_SANDBOXES):
        await client.create("default")
    await page.goto(f"{page.url.partition('/console/')[0]}/console/sandboxes")
    await page.locator("tbody tr").nth(_SANDBOXES - 1).wait_for()
    await _paragraphs(plain, _SANDBOXES)
    return await _frames(page, None, plain, rounds, progress)


async def _frames(
    page: Page, selector: str | None, plain: Page, rounds: int, progress: Progress
) -> Samples:
    async def frames(of: Page, box: str | None) -> float:
        await of.bring_to_front()
        return float(await of.evaluate(_FRAMES, [box, _SCROLL_S]))

    samples = await in_turn(
        rounds, partial(frames, page, selector), partial(frames, plain, None), progress
    )
    return Samples(*samples, "as many paragraphs")


async def _key(client: Client, page: Page, plain: Page, rounds: int, progress: Progress) -> Samples:
    await _conversation(client, page)
    await plain.set_content("<textarea></textarea>")
    for each in (page, plain):
        await each.evaluate(_KEYS)

    async def painted_ms(of: Page) -> float:
        await of.bring_to_front()
        await of.locator("textarea").focus()
        before = await of.evaluate("window.painted.length")
        await of.keyboard.press("x")
        return float(await of.evaluate(_PAINTED, before))

    samples = await in_turn(rounds, partial(painted_ms, page), partial(painted_ms, plain), progress)
    return Samples(*samples, "a text area alone")


async def _output(
    client: Client, page: Page, plain: Page, rounds: int, progress: Progress
) -> Samples:
    box = await client.create("default")
    await box.run("1")
    await page.goto(f"{page.url.partition('/console/')[0]}/console/sandboxes/{box.id}")
    await page.get_by_role("tab", name="Cells").click()
    cell = page.get_by_role("group", name="Cell 2")
    await cell.locator(".cm-content").wait_for()
    await cell.get_by_role("textbox").fill(f"print('line of output\\n' * {_LINES}); 'the end'")

    async def longest_ms() -> float:
        await page.bring_to_front()
        await page.evaluate(_GAPS)
        await cell.get_by_role("button", name="Run", exact=True).click()
        await cell.locator("[aria-busy=true]").wait_for(state="attached")
        await cell.locator("[aria-busy=false]").wait_for(state="attached", timeout=120_000)
        return float(await page.evaluate("window.gap"))

    async def plain_ms() -> float:
        await plain.bring_to_front()
        await plain.set_content("<pre></pre>")
        await plain.evaluate(_GAPS)
        text = json.dumps("line of output\n" * (200_000 // 15))
        await plain.evaluate(f"document.querySelector('pre').textContent = {text}")
        await plain.evaluate("new Promise((resolve) => setTimeout(resolve, 500))")
        return float(await plain.evaluate("window.gap"))

    samples = await in_turn(rounds, longest_ms, plain_ms, progress)
    return Samples(*samples, "200 KB of text in an empty page")


BENCHES = (
    Bench("console_open", "ms", 300.0, partial(_row, _open), rounds=20),
    Bench("console_scroll", "1/s", 50.0, partial(_row, _scroll), rounds=5, better="higher"),
    Bench("console_list", "1/s", 50.0, partial(_row, _list), rounds=5, better="higher"),
    Bench("console_key", "ms", 50.0, partial(_row, _key), rounds=50),
    Bench("console_output", "ms", 200.0, partial(_row, _output), rounds=5),
)
