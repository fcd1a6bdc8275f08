"""`sbx mcp`: the tools for clients of the Model Context Protocol."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import agent_options, exits, narrowing, output
from sbx.cli.connect import Conversation
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from sbx.agent.sandbox import ToolSandbox
    from sbx.agent.settings import AgentSettings
    from sbx.agent.task import TaskTemplate
    from sbx.protocol.changes import ChangesSetting


def mcp(
    policy: agent_options.Policy = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
    env_file: agent_options.EnvFile = None,
    sandbox: Annotated[
        str | None,
        typer.Option(
            help="With --connect: use this sandbox of the service, and keep it at the end.",
            metavar="ID",
        ),
    ] = None,
    conversation: Conversation = "default",
    project: Annotated[
        Path | None,
        typer.Option(
            help="Work in this directory of yours, which is /workspace. The client asks you about "
            "each change and each command.",
            metavar="DIR",
        ),
    ] = None,
    changes: Annotated[
        str | None,
        typer.Option(
            help="With --project: ask about changes of files, or allow them.",
            metavar="ask|allow",
        ),
    ] = None,
) -> int:
    """Serve the tools of an agent over stdio with the Model Context Protocol.

    An MCP client starts this command and gets a new sandbox until it disconnects; with --sandbox,
    it works in an existing one of a service, for example next to a person in Jupyter. Variables and
    files stay from one call to the next. The tools are run_code, execute_command, read_file,
    write_file, edit_file and list_files. If the client asked for progress, the output of a call is
    streamed as progress. A call that the client cancels is interrupted. The files of the workspace
    are resources, and the templates of tasks are prompts. A client without elicitation cannot ask
    you: what needs an approval is denied.

    In the client's configuration: {"mcpServers": {"sbx": {"command": "sbx", "args": ["mcp"]}}}
    """
    import asyncio

    settings = agent_options.settings(policy=policy, connect=connect, key=key, env_file=env_file)
    options = narrowing.sandbox_options(
        memory=memory, cpus=cpus, network_allow=network_allow, env=env
    )
    if project is not None:
        if sandbox is not None or connect is not None:
            raise BadRequest("--project is a directory of this host, and needs no --connect")
        directory = Path(os.path.realpath(project))
        asyncio.run(_serve_project(directory, settings, changes, options))
        return exits.Exit.OK
    if sandbox is None:
        address, own_key = settings.sandbox_domain, agent_options.key_of(settings)
        box = agent_options.new_sandbox(settings.sandbox_image, options, address, own_key)
        asyncio.run(_serve(box, settings))
        return exits.Exit.OK
    address = settings.sandbox_domain
    if address is None or options or policy is not None:
        raise BadRequest(
            "--sandbox needs --connect, and the sandbox has its policy and limits already",
            code="usage",
            hint="sbx mcp --connect ADDR --sandbox ID",
        )
    key = agent_options.key_of(settings)
    box = agent_options.existing_sandbox(address, key, sandbox, conversation)
    asyncio.run(_serve(box, settings))
    return exits.Exit.OK


async def _serve_project(
    directory: Path, settings: "AgentSettings", changes: str | None, options: Mapping[str, Any]
) -> None:
    """Serve the tools in a directory of the user. Each directory has a data directory of sbx, which
    keeps its quarantine."""
    import hashlib

    from platformdirs import user_data_path

    from sbx.agent.mcp import serve
    from sbx.agent.mcp_calls import McpApprovals
    from sbx.agent.tools.registry import Tools
    from sbx.cli.chat import changes_mode
    from sbx.cli.chat_store import ChatSelection, opened
    from sbx.cli.signals import CancelOnSignal

    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    selection = ChatSelection(
        directory=user_data_path("sbx") / "mcp" / name,
        resume=None,
        policy=settings.sandbox_image,
        project=directory,
        sandboxed=True,
        connect=None,
        key=None,
        approval_timeout_s=settings.approval_timeout,
        changes=changes_mode(changes),
        sandbox=options,
    )
    with CancelOnSignal():
        async with opened(selection) as conversation:

            async def setting() -> "ChangesSetting":
                return conversation.changes

            asks = McpApprovals(
                conversation.approvals, in_project=True, place=conversation.place, changes=setting
            )
            await serve(conversation.sandbox, Tools(), _templates, asks)


async def _templates() -> "dict[str, TaskTemplate]":
    """Return the templates of tasks that are valid."""
    from sbx.agent.task import read_tasks
    from sbx.runtime.settings import Settings

    templates = {}
    for name, template in read_tasks(Settings().tasks_dir).items():
        if isinstance(template, BadRequest):
            output.note(f"{name} cannot be a prompt: {template.message}")
        else:
            templates[name] = template
    return templates


async def _serve(
    opened: "AbstractAsyncContextManager[ToolSandbox]", settings: "AgentSettings"
) -> None:
    from sbx.agent.approvals import Approvals
    from sbx.agent.mcp import serve
    from sbx.agent.mcp_calls import McpApprovals
    from sbx.agent.tools.registry import Tools
    from sbx.cli.signals import CancelOnSignal

    asks = McpApprovals(Approvals(timeout_s=settings.approval_timeout))
    with CancelOnSignal():
        async with opened as sandbox:
            await serve(sandbox, Tools(), _templates, asks)
