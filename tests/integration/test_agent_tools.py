"""The six tools on real kernels."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from live_app import live
from places import short_directory

from sbx import Conversation, Runtime
from sbx.agent.messages import ToolCall
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolResult
from sbx.client import Client
from sbx.runtime.sandbox import AsyncSandbox

TOOLS = Tools()


@pytest.fixture
def talk(box: AsyncSandbox) -> Conversation:
    return box.conversation("default")


@pytest.fixture
async def strict(runtime: Runtime) -> AsyncIterator[Conversation]:
    async with await runtime.create(policy="strict") as box:
        yield box.conversation("default")


async def use(talk: ToolSandbox, name: str, **arguments: Any) -> ToolResult:
    call = ToolCall("call-1", name, json.dumps(arguments))
    return await TOOLS.call(call, talk, lambda stream, text: None)


async def said(talk: ToolSandbox, name: str, **arguments: Any) -> str:
    result = await use(talk, name, **arguments)
    assert not result.is_error, result.text
    return result.text


async def refused(talk: ToolSandbox, name: str, **arguments: Any) -> str:
    result = await use(talk, name, **arguments)
    assert result.is_error, result.text
    return result.text


async def test_python_keeps_its_state_and_tells_results_errors_and_ends(talk: Conversation) -> None:
    assert await said(talk, "run_code", code="x = 20\nprint('hi')") == "[stdout]\nhi"
    assert await said(talk, "run_code", code="x + 1") == "[result]\n21"
    text = await refused(talk, "run_code", code="print('before')\n1 / 0")
    assert text.startswith("[stdout]\nbefore\n\n[error]\n")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "\x1b" not in text
    text = await refused(talk, "run_code", code="import os; os._exit(1)")
    assert "was killed" in text
    assert "are lost" in text
    assert "'x' is not defined" in await refused(talk, "run_code", code="x")


async def test_commands_and_scripts_tell_their_output_and_exit_code(talk: Conversation) -> None:
    heard: list[tuple[str, str]] = []
    asked = {"command": "pwd; echo err >&2; exit 4", "cwd": "/tmp"}
    call = ToolCall("1", "execute_command", json.dumps(asked))
    result = await TOOLS.call(call, talk, lambda stream, text: heard.append((stream, text)))
    assert result.text == "[stdout]\n/tmp\n\n[stderr]\nerr\n\nExit code: 4."
    assert result.is_error
    assert "".join(text for stream, text in heard if stream == "stderr") == "err\n"
    text = await refused(talk, "execute_command", command="sleep 60", timeout=0.2)
    assert "longer than its time-out" in text
    assert "limit_widened" in await refused(talk, "execute_command", command="ls", timeout=1e9)
    text = await said(talk, "run_code", code="echo $((6 * 7))", language="bash")
    assert text == "[stdout]\n42\n\nExit code: 0."


FIGURE = """
from IPython.display import Image
Image(__import__("base64").b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4"
    "2mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
))
"""


async def test_a_figure_is_an_image_and_a_file_the_code_can_open(talk: Conversation) -> None:
    result = await use(talk, "run_code", code=FIGURE)
    (image,) = result.images
    assert image.media_type == "image/png"
    path = result.text.partition("[figures]\n")[2].split()[0]
    assert path.startswith("/workspace/uploads/generated/figure-")
    assert await said(talk, "run_code", code=f"open({path!r}, 'rb').read(4)") == (
        "[result]\nb'\\x89PNG'"
    )
    assert "PNG image" in await refused(talk, "read_file", path=path)


async def test_files_are_written_edited_listed_and_seen_by_code(talk: Conversation) -> None:
    wrote = await said(talk, "write_file", path="src/a.py", content="x = 1\ny = 1\n")
    assert wrote == "wrote 12 bytes to src/a.py"
    await said(talk, "edit_file", path="/workspace/src/a.py", old_string="y = 1", new_string="y=2")
    assert await said(talk, "run_code", code="print(open('src/a.py').read())") == (
        "[stdout]\nx = 1\ny=2"
    )
    assert "/workspace/src/a.py" in await said(talk, "list_files", pattern="*.py")
    assert "/workspace/src" in await said(talk, "list_files")
    await talk.uploads.put_bytes("in.csv", b"a,b\n")
    assert await said(talk, "read_file", path="uploads/temparea/in.csv") == "a,b\n"
    text = await refused(talk, "write_file", path="uploads/temparea/in.csv", content="")
    assert "read-only" in text


async def test_paths_that_lead_out_are_refused(talk: Conversation) -> None:
    code = "import os; os.symlink('/etc/passwd', 'link'); os.mkfifo('pipe'); os.mkfifo('/tmp/pipe')"
    await said(talk, "run_code", code=code)
    assert "not a path that tools can reach" in await refused(talk, "read_file", path="/etc/passwd")
    assert "climbs out" in await refused(talk, "read_file", path="../../etc/passwd")
    assert "climbs out" in await refused(talk, "read_file", path="/tmp/../etc/passwd")
    assert "symlink" in await refused(talk, "read_file", path="link")
    assert "not a regular file" in await refused(talk, "read_file", path="pipe")
    assert "Not a regular file" in await refused(talk, "read_file", path="/tmp/pipe")


HOSTILE = '/tmp/it\'s "$(touch /tmp/evil)" `x` {0} \\ ü/END-OF-PROGRAM'


async def reach_tmp(talk: ToolSandbox) -> None:
    await said(talk, "run_code", code="main = stat = exec = json = 'mine'")
    before = await said(talk, "run_code", code="sorted(k for k in globals() if k[0] != '_')")
    await said(talk, "write_file", path=HOSTILE, content="one\ntwo ü\n")
    await said(talk, "edit_file", path=HOSTILE, old_string="two", new_string="drei")
    assert await said(talk, "read_file", path=HOSTILE) == "one\ndrei ü\n"
    assert await said(talk, "run_code", code=f"open({HOSTILE!r}).read()") == (
        "[result]\n'one\\ndrei ü\\n'"
    )
    listed = await said(talk, "list_files", path="/tmp", pattern="END*")
    assert listed == f"file                12  {HOSTILE}"
    assert "/tmp/evil" not in await said(talk, "list_files", path="/tmp")
    assert "does not exist" in await refused(talk, "read_file", path="/tmp/nothing")
    assert "Is a directory" in await refused(talk, "read_file", path="/tmp")
    assert before == await said(
        talk, "run_code", code="sorted(k for k in globals() if k[0] != '_')"
    )
    assert await said(talk, "run_code", code="main, json") == "[result]\n('mine', 'mine')"


@pytest.mark.full_tier
async def test_tmp_is_reached_beside_the_kernel(talk: Conversation) -> None:
    await reach_tmp(talk)
    running = asyncio.create_task(use(talk, "run_code", code="while True: pass"))
    await said(talk, "read_file", path=HOSTILE)
    assert not running.done(), "it waited for no cell"
    running.cancel()
    await asyncio.wait([running])
    large = "x" * 300_000
    assert "wrote 300000 bytes" in await said(talk, "write_file", path="/tmp/l", content=large)
    sizes: Sequence[str] = (await said(talk, "execute_command", command="wc -c < /tmp/l")).split()
    assert sizes[1] == "300000"


async def test_tmp_is_reached_by_a_cell_where_nothing_starts_a_process(
    strict: Conversation,
) -> None:
    await reach_tmp(strict)


@pytest.mark.full_tier
async def test_the_tools_act_the_same_on_a_sandbox_of_a_service() -> None:
    with short_directory() as directory:
        async with (
            live(directory) as served,
            Client(served.socket) as client,
            await client.create() as box,
        ):
            talk = box.conversation("default")
            await reach_tmp(talk)
            text = await said(talk, "execute_command", command="seq 20000")
            path = text.partition("the whole is in ")[2].partition(",")[0]
            part = await said(talk, "read_file", path=path, offset=3, limit=1)
            assert part.startswith("     3\t2\n")
            assert "not a path that tools can reach" in await refused(
                talk, "read_file", path="/etc/x"
            )
            assert "file_not_found" in await refused(talk, "read_file", path="nothing")
