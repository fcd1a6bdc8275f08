"""The page of the console in Debian's Chromium, before a service whose model is scripted."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_calls import PERSON, project
from console_service import Console, console_service
from model_server import KEY, ModelServer, model_server
from places import short_directory
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect
from pydantic import SecretStr

from sbx.agent.settings import AgentSettings
from sbx.api.agent_v1 import agents_of

# The same engine as chromium, with half of its CPU time: it draws no frames of a browser.
CHROMIUM = Path("/usr/bin/chromium-headless-shell")
WIDE = {"width": 1280, "height": 860}
expect.set_options(timeout=20_000)


@dataclass
class Desk:
    """A service, the model of its agents, a directory of projects, and what the browser reported.

    `foreign` are addresses outside of the two names of the console; `reports` are messages of the
    browser about its policy, and errors of the page.
    """

    console: Console
    model: ModelServer
    projects: Path
    foreign: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)

    async def opened(self, context: BrowserContext, path: str = "/console/") -> Page:
        """A page that is logged in by a link."""
        page = await context.new_page()
        self.watch(page)
        code = await self.console.code(path=path)
        await page.goto(f"{self.console.origin}{path}#login={code}")
        await expect(page.get_by_role("status", name="Connection")).to_be_visible()
        return page

    def watch(self, page: Page) -> None:
        names = (self.console.host, self.console.frames)

        def on_request(request: Any) -> None:
            host = request.url.partition("://")[2].partition("/")[0]
            if request.url.startswith(("http", "ws")) and host not in names:
                self.foreign.append(request.url)

        def on_message(message: Any) -> None:
            text = message.text
            if "Content Security Policy" in text or "TrustedHTML" in text:
                self.reports.append(text)

        page.on("request", on_request)
        page.on("console", on_message)
        page.on("pageerror", lambda error: self.reports.append(str(error)))

    def directory(self, name: str, **files: str) -> Path:
        """A directory of a person below that of the projects; `files` by name without `.txt`."""
        made = self.projects / name
        made.mkdir()
        for stem, text in files.items():
            (made / f"{stem}.txt").write_text(text)
        if os.geteuid() == 0:
            for path in (made, *made.iterdir()):
                os.chown(path, PERSON, PERSON)
        return made

    async def project(self, name: str, **files: str) -> Path:
        directory = self.directory(name, **files)
        async with self.console.served.client() as client:
            await project(client, directory)
        return directory


@pytest_asyncio.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    with short_directory() as directory, model_server() as model:
        projects = directory / "projects"
        projects.mkdir()
        agent = AgentSettings(
            base_url=model.openai_url, api_key=SecretStr(KEY), model_name="scripted"
        )
        service = console_service(directory, agent=agent, project_dirs=(projects,))
        async with service as console:
            desk = Desk(console, model, projects)
            yield desk
            assert desk.foreign == []
            assert desk.reports == []


@pytest_asyncio.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    if not os.path.exists(CHROMIUM):  # noqa: ASYNC240
        if os.environ.get("CI") == "true":
            pytest.fail(f"{CHROMIUM} is missing: scripts/test installs it")
        pytest.skip(f"{CHROMIUM} is missing: install chromium-headless-shell")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM,
            chromium_sandbox=False,
            args=["--disable-dev-shm-usage", "--disable-gpu", "--in-process-gpu"],
        )
        yield browser
        await browser.close()


@pytest_asyncio.fixture
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(
        viewport=WIDE,  # type: ignore[arg-type]  # a TypedDict
        locale="en-US",
        accept_downloads=True,
        reduced_motion="reduce",
    )
    yield context
    await context.close()


@pytest_asyncio.fixture
async def page(desk: Desk, context: BrowserContext) -> Page:
    return await desk.opened(context)


@pytest_asyncio.fixture(autouse=True)
async def at_rest(desk: Desk) -> AsyncIterator[None]:
    """After a test, no agent works and no answer of the model is left."""
    yield
    for run in agents_of(desk.console.served.app).chats.every():
        await run.abort()
    desk.model.forget()


@pytest_asyncio.fixture
async def client(desk: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with desk.console.served.client() as client:
        yield client


@pytest_asyncio.fixture
async def place() -> AsyncIterator[Path]:
    with short_directory() as directory:
        yield directory
