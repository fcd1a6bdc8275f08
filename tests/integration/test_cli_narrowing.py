"""--memory, --cpus, --env and --network-allow: the same in each command that makes a sandbox."""

import json
from pathlib import Path

import pytest
from command import COMMAND, environment, in_process
from mcp import Client, StdioServerParameters
from mcp_types import TextContent
from places import short_directory
from service_process import service

_PRINTS = "import os; print('COLOUR is', os.environ.get('COLOUR'))"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    call = {"name": "run_code", "arguments": json.dumps({"code": _PRINTS})}
    answers = [
        {"content": "", "tool_calls": [call], "usage": [1, 1], "stop": "tools"},
        {"content": "done", "tool_calls": [], "usage": [1, 1], "stop": "end"},
    ]
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"model": "recorded", "answers": answers}))
    return path


@pytest.fixture
def networked(tmp_path: Path) -> Path:
    """A policy that allows two hosts."""
    path = tmp_path / "lab.toml"
    path.write_text(
        'schema = 1\nextends = "networked"\n[network]\nallow = ["*.example.org", "example.com"]\n'
    )
    return path


def words_of(command: str, recording: Path) -> list[str | Path]:
    replay: list[str | Path] = ["--replay", recording]
    words: dict[str, list[str | Path]] = {
        "run": ["run", "-c", _PRINTS],
        "agent": ["agent", "look", *replay],
        "chat": ["chat", *replay, "--data-dir", recording.parent / "chat"],
    }
    return words[command]


@pytest.mark.parametrize("command", ["run", "agent", "chat"])
def test_a_variable_and_limits_reach_the_sandbox(command: str, recording: Path) -> None:
    options = ("--env", "COLOUR=green", "--memory", "300MiB", "--cpus", "0.5")
    ended = in_process(*words_of(command, recording), *options, stdin=b"look\n")
    assert ended.returncode == 0, ended.stderr
    assert "COLOUR is green" in ended.stdout + ended.stderr


@pytest.mark.parametrize("command", ["run", "agent", "chat"])
@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("--memory", "900GiB", "limits.memory_max"),
        ("--cpus", "64", "limits.cpu_quota"),
        ("--network-allow", "example.org", "network"),
    ],
)
def test_no_option_goes_beyond_the_policy(
    command: str, option: str, value: str, key: str, recording: Path
) -> None:
    ended = in_process(*words_of(command, recording), option, value, stdin=b"look\n")
    assert ended.returncode == 2
    assert f"error: {key}" in ended.stderr
    assert "goes beyond policy default" in ended.stderr


def test_a_memory_limit_ends_what_needs_more(recording: Path) -> None:
    del recording
    ended = in_process("run", "--memory", "128MiB", "-c", "x = bytearray(400 << 20)")
    assert ended.returncode in (1, 137)  # a MemoryError, or killed by its cgroup
    assert "memory" in ended.stderr.lower()


@pytest.mark.parametrize(
    ("hosts", "code"),
    [
        (("api.example.org",), 0),
        (("api.example.org", "example.com"), 0),
        (("api.example.net",), 2),
    ],
)
def test_hosts_are_chosen_among_those_of_the_policy(
    hosts: tuple[str, ...], code: int, networked: Path
) -> None:
    options = [word for host in hosts for word in ("--network-allow", host)]
    ended = in_process("run", "--policy", networked, *options, "-c", "1")
    assert ended.returncode == code, ended.stderr
    assert code == 0 or "network.allow" in ended.stderr


async def test_an_mcp_client_gets_them_too() -> None:
    command, *first = COMMAND
    words = [*first, "mcp", "--env", "COLOUR=green", "--memory", "300MiB"]
    server = StdioServerParameters(command=command, args=words, env=environment())
    async with Client(server) as client:
        result = await client.call_tool("run_code", {"code": _PRINTS})
    text = "".join(one.text for one in result.content if isinstance(one, TextContent))
    assert "COLOUR is green" in text


def test_a_service_gets_them_with_the_request() -> None:
    with short_directory() as directory, service(directory) as served:
        options = ("--memory", "300MiB", "--cpus", "0.5", "--env", "COLOUR=green")
        created = in_process("create", "--connect", served.socket, *options)
        assert created.returncode == 0, created.stderr
        sandbox = created.stdout.strip()
        words = ("exec", sandbox, "-c", _PRINTS, "--connect", served.socket)
        assert in_process(*words).stdout == "COLOUR is green\n"
        look = ("inspect", sandbox, "--json", "--connect", served.socket)
        (kernel,) = json.loads(in_process(*look).stdout)["kernels"]
        limits = kernel["receipt"]["limits"]
        assert (limits["memory_max"], limits["cpu_quota"]) == (300 << 20, 0.5)
        twice = ("--memory", "1MiB", "--narrow", "limits.memory_max=2MiB")
        refused = in_process("create", "--connect", served.socket, *twice)
        assert "limits.memory_max is set twice" in refused.stderr


def test_a_stored_conversation_keeps_its_limits(recording: Path) -> None:
    chat = words_of("chat", recording)
    assert in_process(*chat, "--memory", "300MiB", stdin=b"look\n").returncode == 0
    again = in_process(*chat, "--resume", "--memory", "200MiB", stdin=b"look\n")
    assert again.returncode == 2
    assert "the sandbox of a stored conversation keeps its limits" in again.stderr
    assert in_process(*chat, "--resume", stdin=b"look\n").returncode == 0
