"""`sbx mcp`: its user approves access and, with `--project`, changes and commands. And prompts."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, environment
from mcp import Client, MCPError, StdioServerParameters
from mcp_types import CallToolResult, ElicitRequestParams, ElicitResult, TextContent
from web import Web, granting, web

PATIENCE_S = 120.0


class Person:
    """Answers the questions of a client, and keeps them."""

    def __init__(self, *answers: str) -> None:
        self.questions: list[str] = []
        self._answers = list(answers)

    async def __call__(self, _: Any, params: ElicitRequestParams) -> ElicitResult:
        self.questions.append(params.message)
        match self._answers.pop(0):
            case "yes":
                return ElicitResult(action="accept", content={"approve": True})
            case "unchecked":
                return ElicitResult(action="accept", content={"approve": False})
            case "cancel":
                return ElicitResult(action="cancel")
        return ElicitResult(action="decline")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "notes.txt").write_text("colour\n")
    return directory


@pytest.fixture
def site(project: Path) -> Iterator[Web]:
    """A site, and the policy `granting` in the directory `policies` next to the project."""
    policies = project.parent / "policies"
    policies.mkdir()
    with web() as site:
        (policies / "granting.toml").write_text(granting(site))
        yield site


@asynccontextmanager
async def connected(
    project: Path,
    *words: str,
    person: Any = None,
    mode: Any = "auto",
    in_project: bool = True,
    **env: str,
) -> AsyncIterator[Client]:
    command, *first = COMMAND
    home = project.parent
    place = ("--project", str(project)) if in_project else ()
    server = StdioServerParameters(
        command=command,
        args=[*first, "mcp", *place, *words],
        env=environment(XDG_DATA_HOME=str(home / "data"), **env),
    )
    async with (
        asyncio.timeout(PATIENCE_S),
        Client(server, elicitation_callback=person, mode=mode) as client,
    ):
        yield client


def text_of(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content if isinstance(part, TextContent))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_change_is_made_after_a_yes_and_only_then(project: Path, mode: str) -> None:
    person = Person("yes", "no", "cancel", "unchecked")
    command = {"command": "sed -i s/colour/color/ notes.txt && echo changed"}
    async with connected(project, person=person, mode=mode) as client:
        read = await client.call_tool("read_file", {"path": "notes.txt"})
        assert "colour" in text_of(read)
        assert not person.questions
        made = await client.call_tool("execute_command", command)
        assert not made.is_error, text_of(made)
        assert (project / "notes.txt").read_text() == "color\n"
        (question,) = person.questions
        assert "sed -i s/colour/color/ notes.txt" in question
        assert "~ /workspace/notes.txt" in question
        assert "+color" in question
        for _ in range(3):
            write = {"path": "new.txt", "content": "x"}
            refused = await client.call_tool("write_file", write)
            assert refused.is_error
            assert "denied" in text_of(refused)
        assert not (project / "new.txt").exists()
        assert len(person.questions) == 4


async def test_the_output_of_a_trial_comes_as_progress(project: Path) -> None:
    """It came when the trial had ended, and this one has no end."""
    running = asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if message is not None and message.startswith("begun"):
            running.set()

    code = "open('new.txt', 'w').write('x'); print('begun', flush=True)\nwhile True: pass"
    async with connected(project, person=Person(), mode="legacy") as client:
        calling = asyncio.create_task(
            client.call_tool("run_code", {"code": code}, progress_callback=on_progress)
        )
        await running.wait()
        calling.cancel()
        await asyncio.wait([calling])
        assert "notes.txt" in text_of(await client.call_tool("list_files", {}))
    assert not (project / "new.txt").exists()


async def test_a_client_without_elicitation_cannot_change_anything(project: Path) -> None:
    async with connected(project) as client:
        refused = await client.call_tool("write_file", {"path": "new.txt", "content": "x"})
        assert refused.is_error
        assert "a person must approve" in text_of(refused)
        assert not (project / "new.txt").exists()
        outside = await client.call_tool("read_file", {"path": "/etc/shadow"})
        assert outside.is_error


async def test_changes_are_allowed_where_the_user_said_so(project: Path) -> None:
    async with connected(project, "--changes", "allow") as client:
        made = await client.call_tool("write_file", {"path": "new.txt", "content": "x"})
        assert not made.is_error, text_of(made)
        assert (project / "new.txt").read_text() == "x"


async def test_an_answer_counts_for_its_own_call_only(project: Path) -> None:
    person = Person()
    async with connected(project, person=person) as client:
        write = {"path": "new.txt", "content": "x"}
        first: Any = await client.session.call_tool("write_file", write, allow_input_required=True)
        assert first.result_type == "input_required"
        answers: dict[str, Any] = {
            "approval": ElicitResult(action="accept", content={"approve": True})
        }
        for name, arguments, state in (
            ("write_file", {"path": "other.txt", "content": "x"}, first.request_state),
            ("execute_command", {"command": "touch other.txt"}, first.request_state),
            ("write_file", write, "0" * 32),
        ):
            with pytest.raises(MCPError, match="does not wait for an answer"):
                await client.session.call_tool(
                    name,
                    arguments,
                    input_responses=answers,
                    request_state=state,
                    allow_input_required=True,
                )
        assert list(project.iterdir()) == [project / "notes.txt"]  # noqa: ASYNC240
        made: Any = await client.session.call_tool(
            "write_file",
            write,
            input_responses=answers,
            request_state=first.request_state,
            allow_input_required=True,
        )
        assert not made.is_error
        assert (project / "new.txt").read_text() == "x"
        with pytest.raises(MCPError, match="does not wait for an answer"):
            await client.session.call_tool(
                "write_file", write, input_responses=answers, request_state=first.request_state
            )


async def test_templates_of_tasks_are_prompts(project: Path) -> None:
    tasks = project.parent / "tasks"
    tasks.mkdir()
    (tasks / "review.toml").write_text(
        'description = "Reviews a file"\nprompt = "Review ${file} ${how}"\n'
        '[parameters.file]\ndescription = "Its path"\n[parameters.how]\ndefault = "briefly"\n'
    )
    (tasks / "broken.toml").write_text("x = 1")
    async with connected(project, SBX_TASKS_DIR=str(tasks)) as client:
        (prompt,) = (await client.list_prompts()).prompts
        assert (prompt.name, prompt.description) == ("review", "Reviews a file")
        assert [(each.name, each.required) for each in prompt.arguments or ()] == [
            ("file", True),
            ("how", False),
        ]
        result = await client.get_prompt("review", {"file": "a.py"})
        (message,) = result.messages
        assert isinstance(message.content, TextContent)
        assert message.content.text == "Review a.py briefly"
        for name in ("review", "nothing"):
            with pytest.raises(MCPError):
                await client.get_prompt(name, {})


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_refused_access_is_asked_about(project: Path, site: Web, mode: str) -> None:
    person = Person("yes", "yes", "yes", "no")
    # The name of curl marks a command that needs the network; it may be missing here.
    code = f"import urllib.request as u; print(u.urlopen('{site.url}/menu').read().decode())"
    fetch = {"command": f': curl; python -c "{code}"'}
    options = ("--policy", "granting")
    how: dict[str, Any] = {"mode": mode, "SBX_POLICY_DIRS": str(project.parent / "policies")}
    async with connected(project, *options, person=person, **how) as client:
        assert "request_access" in {tool.name for tool in (await client.list_tools()).tools}
        first = await client.call_tool("execute_command", fetch)
        assert "granted connections to" in text_of(first)
        assert "hello" not in text_of(first)
        assert site.asked == []
        assert person.questions[1] == f"Grant connections to {site.host}, for the next run?"
        second = await client.call_tool("execute_command", fetch)
        assert "hello from /menu" in text_of(second)
        asks = {"kind": "network", "target": site.host, "reason": "for\u202e the menu"}
        refused = await client.call_tool("request_access", asks)
        assert "denied" in text_of(refused)
        assert person.questions[3].splitlines() == [
            f"Grant connections to {site.host}, for the next run?",
            "The model gives this reason: for\\u202e the menu",
        ]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_refused_access_is_asked_about_without_a_project(
    project: Path, site: Web, mode: str
) -> None:
    fetch = {"code": f"import urllib.request as u; print(u.urlopen('{site.url}/menu').read())"}
    access = {"kind": "network", "target": site.host}
    person = Person("no", "yes")
    how: dict[str, Any] = {
        "mode": mode,
        "SBX_POLICY_DIRS": str(project.parent / "policies"),
        "in_project": False,
    }
    async with connected(project, "--policy", "granting", person=person, **how) as client:
        assert "denied" in text_of(await client.call_tool("run_code", fetch))
        assert site.asked == []
        assert "granted" in text_of(await client.call_tool("request_access", access))
        assert "hello from /menu" in text_of(await client.call_tool("run_code", fetch))
    async with connected(project, "--policy", "granting", **how) as client:
        refused = text_of(await client.call_tool("run_code", fetch))
        assert "refused by network.allow" in refused
    assert person.questions == [f"Grant connections to {site.host}, for the next run?"] * 2
