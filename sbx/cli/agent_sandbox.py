"""The sandbox of an agent or an MCP client: a new one, in this process or in a service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.errors import SbxError

if TYPE_CHECKING:
    from sbx.agent.sandbox import ToolSandbox
    from sbx.agent.settings import AgentSettings

Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="The name or the file of a policy; for a service, a name. Default: SANDBOX_IMAGE, "
        "else default.",
        metavar="POLICY",
    ),
]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        help="Use a sandbox in a service: its socket, or http://HOST:PORT. Default: "
        "SANDBOX_DOMAIN, else a sandbox in this process.",
        metavar="ADDR",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="A key or a token for that service. Prefer SANDBOX_API_KEY: other users can see the "
        "options of a command.",
        metavar="KEY",
    ),
]
_CONVERSATION = "default"
_ENDING_S = 10.0


@asynccontextmanager
async def own_sandbox(settings: "AgentSettings") -> "AsyncIterator[ToolSandbox]":
    """Yield a new sandbox and delete it on exit. Raise as `Runtime.create` or `Client.create`."""
    policy, domain = settings.sandbox_image, settings.sandbox_domain
    opened = _here(policy) if domain is None else _there(policy, domain, key_of(settings))
    async with opened as sandbox:
        yield sandbox


def key_of(settings: "AgentSettings") -> str | None:
    """Return the service's key in plain text."""
    key = settings.sandbox_api_key
    return None if key is None else key.get_secret_value()


@asynccontextmanager
async def _here(policy: str) -> "AsyncIterator[ToolSandbox]":
    from sbx.policy import reference
    from sbx.runtime.runtime import Runtime
    from sbx.runtime.settings import Settings

    # A zygote pays off from the second kernel on. This runtime starts a single kernel.
    async with Runtime(Settings(fast_path=False)) as runtime:
        box = await runtime.create(reference(policy))
        yield box.conversation(_CONVERSATION)


@asynccontextmanager
async def _there(policy: str, connect: str, key: str | None) -> "AsyncIterator[ToolSandbox]":
    import asyncio  # a lazy import keeps `sbx --help` fast

    from sbx.client import Client

    async with Client(connect, key=key) as client:
        box = await client.create(policy)
        try:
            yield box.conversation(_CONVERSATION)
        finally:
            # A service that exited has ended the sandbox itself.
            with suppress(SbxError, TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await box.close()
