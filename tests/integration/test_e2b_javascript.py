"""E2B's JavaScript packages against the service, under Node.js: the tests of e2b_javascript.mjs."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
import pytest_asyncio
from e2b_face import e2b_key
from sdk_service import SdkService

from tests.debian_tools import cache

SCRIPT = Path(__file__).parent / "e2b_javascript.mjs"
MODULES = cache() / "javascript/node_modules"
NAMES = re.findall(r"^test\('([^']+)'", SCRIPT.read_text(), re.MULTILINE)
_LINE = re.compile(r"^(ok|not ok) \d+ - (.+?)$", re.MULTILINE)

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "e2b").is_dir(),
    reason="Node.js or the npm packages of E2B are missing; scripts/test installs the packages",
)


@pytest_asyncio.fixture(scope="module")
async def output(sdk: SdkService) -> str:
    """What Node.js reports about all tests."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "E2B_MODULES": str(MODULES),
        "E2B_API_URL": sdk.url,
        "E2B_SANDBOX_URL": sdk.url,
        "E2B_API_KEY": e2b_key(await sdk.key("node")),
    }
    node = shutil.which("node")
    assert node is not None
    process = await asyncio.create_subprocess_exec(
        node,
        "--test",
        "--test-force-exit",  # its pool of connections stays open for a minute
        "--test-reporter=tap",
        str(SCRIPT),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(110):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode()


def test_there_are_twenty() -> None:
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
async def test_in_javascript(output: str, name: str) -> None:
    results = {title: word for word, title in _LINE.findall(output)}
    assert results.get(name) == "ok", output[-20_000:]
