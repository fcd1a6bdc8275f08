"""The examples in the READMEs of the SDKs, with another address and key, and otherwise unchanged.

Left out are those that need another service (Redis), an image with its own server (nginx), a
pool that is filled at once, or
snapshots, sessions, volumes and a vault, which sbx does not offer.
"""

import asyncio
import importlib.metadata
import os
import re
import sys

import pytest
from e2b_face import e2b_key
from sdk_service import SdkService

BLOCK = re.compile(r"```py(?:thon)?\n(.*?)```", re.DOTALL)
CONNECTED = """
from opensandbox.sandbox import Sandbox
from opensandbox.config import ConnectionConfig
config = ConnectionConfig(domain="api.opensandbox.io", api_key="your-api-key")
sandbox = await Sandbox.create("ubuntu", connection_config=config)
"""
INTERPRETER = """
from opensandbox.sandbox import Sandbox
from opensandbox.config import ConnectionConfig
from code_interpreter import CodeInterpreter
sandbox = await Sandbox.create(
    "opensandbox/code-interpreter:v1.1.0",
    connection_config=ConnectionConfig(domain="api.opensandbox.io", api_key="your-api-key"),
    entrypoint=["/opt/code-interpreter/code-interpreter.sh"],
)
interpreter = await CodeInterpreter.create(sandbox)
"""
ENDED = "\nawait sandbox.destroy()\n"


def example(package: str, mark: str) -> str:
    """The only example of a package that has this text."""
    text = importlib.metadata.distribution(package).read_text("METADATA") or ""
    (block,) = [each for each in BLOCK.findall(text) if mark in each]
    return str(block)


RUN = """
import ast, asyncio, inspect, sys
names = {"__name__": "__main__"}
code = compile(sys.stdin.read(), "README", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
if inspect.iscoroutine(awaiting := eval(code, names)):
    asyncio.run(awaiting)
"""


async def printed(sdk: SdkService, code: str) -> list[str]:
    """Run an example in a process, as its reader does; the lines that it prints."""
    key = await sdk.key("reader")
    addresses = {
        "OPEN_SANDBOX_API_KEY": key,
        "E2B_API_URL": sdk.url,
        "E2B_SANDBOX_URL": sdk.url,
        "E2B_API_KEY": e2b_key(key),
    }
    code = code.replace("api.opensandbox.io", f"{sdk.host}/opensandbox")
    code = code.replace("your-api-key", key).replace("your-key", key)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        RUN,
        env={**os.environ, **addresses},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            out, problems = await process.communicate(code.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, problems.decode()
    return [line for line in out.decode().splitlines() if line]


@pytest.mark.parametrize(
    ("package", "mark", "lines"),
    [
        ("e2b", "Hello from E2B!", ["Hello from E2B!"]),
        pytest.param("e2b", "from e2b_code_interpreter", ["2"], marks=pytest.mark.full_tier),
        ("e2b-code-interpreter", "# outputs 2", ["2"]),
        ("opensandbox", "# 5. Terminate the remote", ["Hello Sandbox!"]),
        pytest.param(
            "opensandbox",
            "max_connections=20",
            ["Hello Sandbox!"],
            marks=pytest.mark.full_tier,
        ),
        pytest.param(
            "opensandbox-code-interpreter", "HTTPTransport(", ["4"], marks=pytest.mark.full_tier
        ),
    ],
)
async def test_an_example_that_is_whole(
    sdk: SdkService, package: str, mark: str, lines: list[str]
) -> None:
    assert await printed(sdk, example(package, mark)) == lines
    await sdk.served.empty()


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("sandbox.renew(", r"State: Running\nExpires: 20.*"),
        ("handle_complete", r"(STDOUT: Count [1-5]\n){5}Command finished in \d+ms"),
        ("SearchEntry(", r"Content: Hello World\nFound: /tmp/hello.txt"),
        ("list_sandbox_infos", r"Found sandbox: sandbox-\w+"),
        ("X-Custom-Header", ""),
        ('metadata={"project": "demo"}', ""),
    ],
)
async def test_an_example_with_a_sandbox(sdk: SdkService, mark: str, shown: str) -> None:
    code = CONNECTED + example("opensandbox", mark)
    lines = await printed(sdk, code)
    assert re.fullmatch(shown, "\n".join(lines)), lines
    await sdk.served.empty()


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("x = 42", ""),
        ('result = 2 + 2\\nresult",\n    language', ""),
        ("users.append", ""),
        ("STDERR:", r"(STDOUT: [0-4]\n?)+"),
    ],
)
async def test_an_example_with_an_interpreter(sdk: SdkService, mark: str, shown: str) -> None:
    code = INTERPRETER + example("opensandbox-code-interpreter", mark) + ENDED
    lines = await printed(sdk, code)
    assert re.fullmatch(shown, "\n".join(lines)), lines


async def test_the_first_example_of_the_interpreter(sdk: SdkService) -> None:
    code = example("opensandbox-code-interpreter", "async def main() -> None")
    assert (await printed(sdk, code))[0] == "4"
    await sdk.served.empty()
