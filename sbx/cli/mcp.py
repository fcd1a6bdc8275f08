"""`sbx mcp`: the tools for clients of the Model Context Protocol."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sbx.cli import agent_options, exits, narrowing

if TYPE_CHECKING:
    from sbx.agent.settings import AgentSettings


def mcp(
    policy: agent_options.Policy = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
) -> int:
    """Serve the tools of an agent over stdio with the Model Context Protocol.

    An MCP client starts this command and gets a new sandbox until it disconnects. Variables and
    files stay from one call to the next. The tools are run_code, execute_command, read_file,
    write_file, edit_file and list_files. If the client asked for progress, the output of a call is
    streamed as progress. A call that the client cancels is interrupted.

    In the client's configuration: {"mcpServers": {"sbx": {"command": "sbx", "args": ["mcp"]}}}
    """
    import asyncio

    settings = agent_options.settings(policy=policy, connect=connect, key=key)
    options = narrowing.sandbox_options(
        memory=memory, cpus=cpus, network_allow=network_allow, env=env
    )
    asyncio.run(_serve(settings, options))
    return exits.Exit.OK


async def _serve(settings: "AgentSettings", options: Mapping[str, Any]) -> None:
    from sbx.agent.mcp import serve
    from sbx.agent.tools.registry import Tools
    from sbx.cli.signals import CancelOnSignal

    with CancelOnSignal():
        async with agent_options.own_sandbox(settings, options) as sandbox:
            await serve(sandbox, Tools())
