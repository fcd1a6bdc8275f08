"""The sandbox that an agent or an MCP client works in: one of its own, here or in a service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.errors import SbxError

if TYPE_CHECKING:
    from sbx.agent.sandbox import Sandbox
    from sbx.agent.settings import AgentSettings

Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="A policy's name, or its file; of a service, a name. Else SANDBOX_IMAGE, or default.",
        metavar="POLICY",
    ),
]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        help="Use a sandbox in a service: its socket, or http://HOST:PORT. Else SANDBOX_DOMAIN, or "
        "one in this process.",
        metavar="ADDR",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="A key or a token for that service. Better in SANDBOX_API_KEY: other users see "
        "options.",
        metavar="KEY",
    ),
]
_CONVERSATION = "default"
_ENDING_S = 10.0


@asynccontextmanager
async def own_sandbox(settings: "AgentSettings") -> "AsyncIterator[Sandbox]":
    """A new one, gone when this is left. Raises what `Runtime.create` and `Client.create` do."""
    policy, domain = settings.sandbox_image, settings.sandbox_domain
    opened = _here(policy) if domain is None else _there(policy, domain, key_of(settings))
    async with opened as sandbox:
        yield sandbox


def key_of(settings: "AgentSettings") -> str | None:
    """The service's key, in clear."""
    key = settings.sandbox_api_key
    return None if key is None else key.get_secret_value()


@asynccontextmanager
async def _here(policy: str) -> "AsyncIterator[Sandbox]":
    from sbx.policy import reference
    from sbx.runtime.runtime import Runtime
    from sbx.runtime.settings import Settings

    # A zygote pays for the second kernel, and this runtime starts one.
    async with Runtime(Settings(fast_path=False)) as runtime:
        box = await runtime.create(reference(policy))
        yield box.conversation(_CONVERSATION)


@asynccontextmanager
async def _there(policy: str, connect: str, key: str | None) -> "AsyncIterator[Sandbox]":
    import asyncio  # not for `sbx --help`

    from sbx.client import Client

    async with Client(connect, key=key) as client:
        box = await client.create(policy)
        try:
            yield box.conversation(_CONVERSATION)
        finally:
            with suppress(SbxError, TimeoutError):  # a service that is gone has ended it itself
                async with asyncio.timeout(_ENDING_S):
                    await box.close()
