"""The page of an installation from the wheel, for root and for a user without rights."""

import asyncio
import json
import os
import signal
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from as_unprivileged import as_user
from playwright.async_api import Browser, expect

from sbx.console import STATIC
from tests.browser import names
from tests.browser.conftest import WIDE
from tests.browser.names import LOCALES, Named

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """A directory that everybody may pass; pytest's own are for root alone."""
    with tempfile.TemporaryDirectory(prefix="console-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture(scope="module")
async def site(top: Path) -> Path:
    """The content of the wheel, to be imported from there."""
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    building = await asyncio.create_subprocess_exec(*words, str(top / "wheel"), cwd=ROOT)
    assert await building.wait() == 0
    (wheel,) = (top / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(top / "site")
    for path in ((top / "site"), *(top / "site").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return top / "site"


@asynccontextmanager
async def console(top: Path, site: Path, *, unprivileged: bool) -> AsyncIterator[str]:
    """`sbx console`, which starts a service of its own; yields its link."""
    with tempfile.TemporaryDirectory(dir=top) as place:
        os.chmod(place, 0o755)
        words, env = [sys.executable, "-m", "sbx", "console", "--json"], dict(os.environ)
        if unprivileged:
            words, env = as_user(words, Path(place))
        else:
            env |= {"SBX_SOCKET": f"{place}/run/sbx.sock", "SBX_DATA_DIR": f"{place}/data"}
        env["PYTHONPATH"] = str(site)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, cwd=place, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(90):
                document = await process.stdout.readuntil(b"}\n")
            yield str(json.loads(document)["url"])
        finally:
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                assert await process.wait() == 0


def test_the_wheel_has_the_page_and_not_its_source(site: Path) -> None:
    static = site / "sbx" / "console" / "static"
    for path in STATIC.iterdir():
        assert (static / path.name).read_bytes() == path.read_bytes()
    assert not (site / "sbx" / "console" / "source").exists()


@pytest.mark.parametrize(
    "unprivileged",
    [
        pytest.param(False, marks=pytest.mark.full_tier),  # the other tests run as root
        pytest.param(True, marks=pytest.mark.needs("root")),
    ],
)
async def test_the_page_opens_by_the_link_of_the_command(
    top: Path, site: Path, browser: Browser, unprivileged: bool
) -> None:
    reports: list[str] = []
    async with console(top, site, unprivileged=unprivileged) as url:
        context = await browser.new_context(viewport=WIDE, locale=LOCALES["ja"])  # type: ignore[arg-type]  # a TypedDict
        page = await context.new_page()
        page.on("pageerror", lambda error: reports.append(str(error)))
        await page.goto(url)
        named = Named(page, "ja")
        await names.check_frame_and_lists(named)
        if unprivileged:
            await names.check_a_sandbox(named)
        await named.open("settings")
        await named.one("combobox", "settings.language").select_option("en")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Settings")
        await context.close()
    assert reports == []
