"""`sbx mcp`: the tools for clients of the Model Context Protocol."""

from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import agent_options, exits, narrowing
from sbx.cli.connect import Conversation
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from sbx.agent.sandbox import ToolSandbox


def mcp(
    policy: agent_options.Policy = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
    sandbox: Annotated[
        str | None,
        typer.Option(
            help="With --connect: use this sandbox of the service, and keep it at the end.",
            metavar="ID",
        ),
    ] = None,
    conversation: Conversation = "default",
) -> int:
    """Serve the tools of an agent over stdio with the Model Context Protocol.

    An MCP client starts this command and gets a new sandbox until it disconnects; with --sandbox,
    it works in an existing one of a service, for example next to a person in Jupyter. Variables and
    files stay from one call to the next. The tools are run_code, execute_command, read_file,
    write_file, edit_file and list_files. If the client asked for progress, the output of a call is
    streamed as progress. A call that the client cancels is interrupted. The files of the workspace
    are resources.

    In the client's configuration: {"mcpServers": {"sbx": {"command": "sbx", "args": ["mcp"]}}}
    """
    import asyncio

    settings = agent_options.settings(policy=policy, connect=connect, key=key)
    options = narrowing.sandbox_options(
        memory=memory, cpus=cpus, network_allow=network_allow, env=env
    )
    if sandbox is None:
        address, own_key = settings.sandbox_domain, agent_options.key_of(settings)
        box = agent_options.new_sandbox(settings.sandbox_image, options, address, own_key)
        asyncio.run(_serve(box))
        return exits.Exit.OK
    address = settings.sandbox_domain
    if address is None or options or policy is not None:
        raise BadRequest(
            "--sandbox needs --connect, and the sandbox has its policy and limits already",
            code="usage",
            hint="sbx mcp --connect ADDR --sandbox ID",
        )
    key = agent_options.key_of(settings)
    asyncio.run(_serve(agent_options.existing_sandbox(address, key, sandbox, conversation)))
    return exits.Exit.OK


async def _serve(opened: "AbstractAsyncContextManager[ToolSandbox]") -> None:
    from sbx.agent.mcp import serve
    from sbx.agent.tools.registry import Tools
    from sbx.cli.signals import CancelOnSignal

    with CancelOnSignal():
        async with opened as sandbox:
            await serve(sandbox, Tools())
