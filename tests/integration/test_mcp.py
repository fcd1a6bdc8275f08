"""`sbx mcp`, by the SDK's own client over real stdio."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from command import COMMAND, environment, in_process, sbx
from mcp import Client, MCPError, StdioServerParameters
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ImageContent,
    TextContent,
    TextResourceContents,
)
from serving import Service

from sbx.client import Client as ServiceClient

PATIENCE_S = 60.0
TOOLS = {"run_code", "execute_command", "read_file", "write_file", "edit_file", "list_files"}

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
DRAWING = (
    "import base64; from IPython.display import Image, display\n"
    f"display(Image(base64.b64decode({PNG!r})))\n"
    r"print('half \ud83d a pair \x00 \u2028')"
)


@asynccontextmanager
async def connected(*words: str, **more: Any) -> AsyncIterator[Client]:
    command, *first = COMMAND
    server = StdioServerParameters(command=command, args=[*first, "mcp", *words], env=environment())
    async with asyncio.timeout(PATIENCE_S), Client(server, **more) as client:
        yield client


def said(result: CallToolResult) -> str:
    return "".join(one.text for one in result.content if isinstance(one, TextContent))


async def test_tools_state_files_errors_and_images() -> None:
    async with connected() as client:
        listed = (await client.list_tools()).tools
        assert {one.name for one in listed} == TOOLS
        schema = next(one.input_schema for one in listed if one.name == "run_code")
        assert schema["required"] == ["code"]

        first = await client.call_tool("run_code", {"code": "x = 41; print('hello')"})
        assert not first.is_error
        assert "hello" in said(first)
        assert "42" in said(await client.call_tool("run_code", {"code": "x + 1"}))

        wrote = await client.call_tool("write_file", {"path": "a/b.txt", "content": "one\ntwo\n"})
        assert not wrote.is_error
        edit = {"path": "/workspace/a/b.txt", "old_string": "two", "new_string": "2"}
        assert not (await client.call_tool("edit_file", edit)).is_error
        shell = await client.call_tool("execute_command", {"command": "cat a/b.txt; exit 3"})
        assert "one\n2" in said(shell)
        assert "b.txt" in said(await client.call_tool("list_files", {"path": "a"}))

        raised = await client.call_tool("run_code", {"code": "1 / 0"})
        assert raised.is_error
        assert "ZeroDivisionError" in said(raised)
        missing = await client.call_tool("run_code", {})
        assert missing.is_error
        assert "code" in said(missing)
        unknown = await client.call_tool("run_cod", {"code": "1"})
        assert unknown.is_error
        assert "run_code" in said(unknown)
        outside = await client.call_tool("read_file", {"path": "/etc/passwd"})
        assert outside.is_error

        # An image is one; and half of a surrogate pair, which UTF-8 cannot carry, ends nothing.
        drawn = await client.call_tool("run_code", {"code": DRAWING})
        (image,) = (one for one in drawn.content if isinstance(one, ImageContent))
        assert (image.mime_type, image.data) == ("image/png", PNG)
        assert r"half \ud83d a pair" in said(drawn)
        assert "2" in said(await client.call_tool("run_code", {"code": "1 + 1"}))


async def test_files_are_resources() -> None:
    async with connected() as client:
        await client.call_tool("write_file", {"path": "a b/ü.csv", "content": "1,2\n"})
        write = "open('/workspace/raw.bin', 'wb').write(bytes([255, 0, 1]))"
        await client.call_tool("run_code", {"code": write})
        listed = {one.name: one for one in (await client.list_resources()).resources}
        table = listed["a b/ü.csv"]
        assert (table.uri, table.size) == ("file:///workspace/a%20b/%C3%BC.csv", 4)
        assert table.mime_type == "text/csv"
        (text,) = (await client.read_resource(table.uri)).contents
        assert isinstance(text, TextResourceContents)
        assert text.text == "1,2\n"
        (blob,) = (await client.read_resource(listed["raw.bin"].uri)).contents
        assert isinstance(blob, BlobResourceContents)
        assert blob.blob == "/wAB"
        for uri in (
            "file:///etc/passwd",
            "file:///workspace/../etc/passwd",
            "file:///workspace/%2e%2e/etc/passwd",
            "file://host/workspace/raw.bin",
            "https://example.org/workspace/raw.bin",
            "file:///workspace/missing",
        ):
            with pytest.raises(MCPError):
                await client.read_resource(uri)
        await client.call_tool("run_code", {"code": "import os; os.symlink('/etc/passwd', 'p')"})
        with pytest.raises(MCPError):
            await client.read_resource("file:///workspace/p")


async def test_an_existing_sandbox_is_used_and_kept(service: Service) -> None:
    async with ServiceClient(service.socket) as client:
        box = await client.create()
        await box.run("x = 41")
        words = ("--connect", str(service.socket), "--sandbox", box.id)
        async with connected(*words) as mcp:
            assert "42" in said(await mcp.call_tool("run_code", {"code": "x + 1; x += 1; x"}))
        assert (await box.run("x")).result == "42"
        await box.close()
    wrong = sbx("mcp", "--sandbox", "any")
    assert wrong.returncode == 2
    assert "--connect" in wrong.stderr
    lost = sbx("mcp", "--connect", service.socket, "--sandbox", "missing")
    assert "missing" in lost.stderr


@pytest.mark.full_tier
async def test_output_comes_live_and_a_call_that_is_cancelled_is_interrupted() -> None:
    answer: list[str | None] = []
    running = asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        answer.append(message)
        running.set()

    endless = (
        "import itertools, time\nprint('begun', flush=True)\n"
        "for n in itertools.count(): time.sleep(0.01)"
    )
    async with connected(mode="legacy") as client:  # by the handshake of before 2026
        calling = asyncio.create_task(
            client.call_tool("run_code", {"code": endless}, progress_callback=on_progress)
        )
        await running.wait()
        assert answer[0] is not None
        assert answer[0].startswith("begun")
        calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled()
        # The kernel is free again, and still the same one: `n` is the loop's.
        assert "True" in said(await client.call_tool("run_code", {"code": "n >= 0"}))


async def test_stdout_is_the_protocol_s_alone_and_the_server_ends_with_its_client() -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "mcp",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    out, _ = await process.communicate(b"this is no JSON\n\n")
    assert process.returncode == 0
    assert all(line.startswith(b'{"jsonrpc"') for line in out.splitlines())


def test_what_is_wrong_with_the_call_is_said_on_stderr_before_anything_is_served() -> None:
    for words, named in ((("--policy", "nowhere"), "nowhere"), (("--connect", "ftp://x"), "ftp:")):
        ended = in_process("mcp", *words)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert named in ended.stderr
