"""`sbx tool`: sources of tools in a directory of the user and in a service, and an agent."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import command
import pytest
import serving
from tool_servers import HttpServer, mcp_file


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return tmp_path / "tools"


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with HttpServer().serving() as serving:
        yield serving


def test_an_mcp_server_from_add_to_rm(tools: Path, tmp_path: Path) -> None:
    in_process = partial(command.in_process, SBX_TOOLS_DIR=str(tools))
    mcp_file(tmp_path)
    program = f"{sys.executable} {tmp_path / 'mcp_server.py'}"
    added = in_process("tool", "add", "sums", "--command", program, "--approval", "allow")
    assert added.returncode == 0, added.stderr
    assert "sums_add" in added.stderr
    assert (tools / "sums.toml").exists()
    listed = json.loads(in_process("tool", "list", "--json").stdout)["sources"]
    assert [(each["name"], each["state"]) for each in listed] == [("sums", "ready")]
    table = in_process("tool", "list")
    assert "sums_add" in table.stdout
    tried = in_process("tool", "test", "sums")
    assert tried.returncode == 0
    assert "Add two numbers." in tried.stdout
    call = in_process("tool", "test", "sums", "--call", "sums_add", "--arguments", '{"a":40,"b":2}')
    assert (call.returncode, call.stdout) == (0, "42\n")
    wrong = in_process("tool", "test", "sums", "--call", "sums_add", "--arguments", "{}")
    assert wrong.returncode == 1
    assert "'a' is missing" in wrong.stdout
    unknown = in_process("tool", "test", "sums", "--call", "sums_ad")
    assert unknown.returncode != 0
    assert "sums_add" in unknown.stderr
    assert in_process("tool", "rm", "sums").returncode == 0
    assert not list(tools.iterdir())
    again = in_process("tool", "rm", "sums")
    assert again.returncode != 0
    assert "sbx tool list" in again.stderr


def test_a_source_that_cannot_be_used_names_the_problem(tools: Path, tmp_path: Path) -> None:
    in_process = partial(command.in_process, SBX_TOOLS_DIR=str(tools))
    for words, problem in (
        ([], "exactly one of --file"),
        (["--command", "x", "--url", "http://h"], "exactly one of --file"),
        (["--openapi", tmp_path / "missing.json"], "cannot be read"),
        (["--python", "no_such_module:f"], "no_such_module"),
        (["--python", "os"], "function"),
        (["--url", "ftp://h"], "must be an address"),
    ):
        refused = in_process("tool", "add", "bad", *words)
        assert refused.returncode != 0
        assert problem in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not tools.exists() or not list(tools.iterdir())
    unreachable = in_process("tool", "add", "absent", "--command", "/no/such/program")
    assert unreachable.returncode == 0  # a server may come later
    assert "not ready" in unreachable.stderr
    assert in_process("tool", "test", "absent").returncode == 1
    (tools / "broken.toml").write_text("x = 1")
    listed = in_process("tool", "list")
    assert listed.returncode == 0
    assert "no such field" in listed.stdout


def test_a_file_and_an_agent(tools: Path, tmp_path: Path, server: HttpServer) -> None:
    in_process = partial(command.in_process, SBX_TOOLS_DIR=str(tools))
    file = tmp_path / "page.toml"
    file.write_text(f'description = "Reads the page"\n[http]\nurl = "{server.url}/page"')
    added = in_process("tool", "add", "page", "--file", file, "--approval", "allow")
    assert added.returncode == 0, added.stderr
    tried = in_process("tool", "test", file, "--json")
    assert json.loads(tried.stdout)["tools"][0]["description"] == "Reads the page"
    recording = tmp_path / "recording.json"
    answers = [
        {
            "content": "",
            "tool_calls": [{"name": "page", "arguments": "{}"}],
            "usage": [1, 1],
            "stop": "tools",
        },
        {"content": "read", "tool_calls": [], "usage": [1, 1], "stop": "end"},
    ]
    recording.write_text(json.dumps({"model": "recorded", "answers": answers}))
    ran = in_process("agent", "run", "Read it", "--replay", recording, "--json")
    assert ran.returncode == 0, ran.stderr
    (end,) = (
        event
        for event in map(json.loads, ran.stdout.splitlines())
        if event.get("type") == "tool_end"
    )
    assert not end["is_error"]
    assert server.requests[-1]["path"] == "/page"
    words = ("--data-dir", tmp_path / "chats", "--replay", recording)
    chat = in_process("chat", *words, stdin=b"Read it")
    assert (chat.returncode, chat.stdout) == (0, "read\n"), chat.stderr
    assert len(server.requests) == 2


def test_a_service(tmp_path: Path, server: HttpServer) -> None:
    file = tmp_path / "page.toml"
    file.write_text(f'[http]\nurl = "{server.url}/page"')
    with serving.service() as service:
        added = service.quick("tool", "add", "page", "--file", file)
        assert added.returncode == 0, added.stderr
        listed = json.loads(service.quick("tool", "list", "--json").stdout)["sources"]
        assert [each["name"] for each in listed] == ["page"]
        assert service.quick("tool", "rm", "page").returncode == 0
        assert json.loads(service.quick("tool", "list", "--json").stdout)["sources"] == []
