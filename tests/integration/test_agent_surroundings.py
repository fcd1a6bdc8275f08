"""Each path, language and tool that a model is offered works in its sandbox."""

import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agent_calls import PERSON, Desk, at, body, following
from sessions_calls import ensure

from sbx import Runtime
from sbx.agent import Agent, ReplayModel, Tools
from sbx.agent.messages import Response, ToolCall
from sbx.agent.prompt import surroundings_of
from sbx.agent.sandbox import ToolSandbox, one_of
from sbx.agent.tools.execution import unheard
from sbx.client import Client
from sbx.service.projects.host_mode import HostSession
from sbx.service.projects.sandbox import open_project
from sbx.service.projects.session import ProjectSession

__all__ = ["at"]
PRINTS = {
    "python": "print('ok')",
    "bash": "echo ok",
    "sh": "echo ok",
    "javascript": "console.log('ok')",
    "js": "console.log('ok')",
    "node": "console.log('ok')",
    "typescript": "const text: string = 'ok'; console.log(text)",
    "ts": "const text: string = 'ok'; console.log(text)",
    "java": 'class Main { public static void main(String[] a) { System.out.println("ok"); } }',
    "go": 'package main\nfunc main() { println("ok") }',
}
HARD = pytest.mark.needs("memory")  # which strict demands as a hard wall
WAYS = (
    *("default", "directory", "service", "project", "host"),
    *(pytest.param(way, marks=HARD) for way in ("strict", "strict directory")),
)


@asynccontextmanager
async def opened(
    way: str, at: Desk, runtime: Runtime, tmp_path: Path
) -> AsyncIterator[ToolSandbox]:
    work = tmp_path / "möbel"
    work.mkdir()
    if os.geteuid() == 0 and way != "host":
        os.chown(work, PERSON, PERSON)
    match way:
        case "service":
            async with Client(at.served.socket) as client, await client.create() as box:
                yield one_of(box)
        case "project":
            session = ProjectSession(await open_project(runtime, "default", work))
            yield session
            await session.close()
        case "host":
            host = HostSession(work, None, 30.0)
            yield host
            await host.close()
        case _:
            policy = way.split()[0].replace("directory", "default")
            workspace = work if "directory" in way else None
            async with await runtime.create(policy, workspace=workspace) as sandbox:
                yield one_of(sandbox)


@pytest.mark.parametrize("way", WAYS)
async def test_everything_that_a_model_is_offered_works(
    way: str, at: Desk, runtime: Runtime, tmp_path: Path
) -> None:
    async with opened(way, at, runtime, tmp_path) as box:
        model = ReplayModel([Response("done")])
        assert (await Agent(box, model).run("hello")).reason == "done"
        request = model.requests[0]
        around = await surroundings_of(box)
        tools = {tool.name: tool for tool in request.tools}

        async def call(name: str, **arguments: str) -> str:
            result = await Tools().call(ToolCall("c", name, json.dumps(arguments)), box, unheard)
            assert not result.is_error, result.text
            return result.text

        for language in tools["run_code"].parameters["properties"]["language"]["enum"]:
            if language in ("typescript", "ts"):  # node may need a compiler of the workspace
                continue
            assert "ok" in await call("run_code", code=PRINTS[language], language=language)
        assert ("execute_command" in tools) == ("strict" not in way)
        if "execute_command" in tools:
            assert around.directory in await call("execute_command", command="pwd")
        assert repr(around.directory) in await call("run_code", code="import os; os.getcwd()")
        described = tools["list_files"].parameters["properties"]["path"]["description"]
        for path in ("/workspace", "/tmp", "/uploads"):
            if path in described:
                await call("list_files", path=path)
        if way == "host":
            assert "/workspace" not in request.system + str(request.tools)
            assert str(tmp_path / "möbel") in described
            await call("list_files", path="/etc")


@pytest.mark.parametrize("in_project", [False, True])
async def test_an_agent_of_a_service_is_offered_its_languages(at: Desk, in_project: bool) -> None:
    """It was offered go on a host without go."""
    name = f"offered-{in_project}"
    async with at.served.client() as http, Client(at.served.socket) as client:
        await ensure(http, "ann", "helper")
        more = {}
        if in_project:
            project = await client.create_project(name, str(at.directory(name)))
            more = {"project_id": project.id}
        at.model.add(Response("done"))
        async for _ in following(http, body(name, **more)):
            pass
        async with await client.create() as box:
            around = await box.surroundings()
    request = at.model.requests[-1].body
    at.model.forget()
    tools = {tool["function"]["name"]: tool["function"] for tool in request["tools"]}
    offered = tools["run_code"]["parameters"]["properties"]["language"]["enum"]
    assert offered == around.run_languages
    assert ("go" in offered) == (shutil.which("go") is not None)
    text = request["messages"][0]["content"]
    assert ("a directory of the user" in text) == in_project
    assert ("/workspace/uploads/temparea" in text) == (not in_project)
