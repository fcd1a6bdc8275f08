"""How a command reaches the service: the options that all of them have, and the call itself."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote

import typer

from sbx.errors import BadRequest

if TYPE_CHECKING:
    from sbx.client import Client

T = TypeVar("T")

Socket = Annotated[
    str | None,
    typer.Option(
        "--socket",
        envvar="SBX_SOCKET",
        help="The service's socket, or http://HOST:PORT of one that listens there.",
        metavar="PATH",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="SBX_KEY",
        help="A key or a token. Better in SBX_KEY: other users see options. Without one, the "
        "socket knows you as a user of this machine.",
        metavar="KEY",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Conversation = Annotated[
    str,
    typer.Option("--conversation", help="Which conversation of the sandbox.", metavar="NAME"),
]
Id = Annotated[str, typer.Argument(help="The sandbox, as in sbx ps.", metavar="ID")]
Ids = Annotated[list[str], typer.Argument(help="Sandboxes, as in sbx ps.", metavar="ID…")]


def ask(socket: str | None, key: str | None, work: "Callable[[Client], Awaitable[T]]") -> T:
    """Connect, do `work`, disconnect. Raises Unavailable `service_unreachable`."""
    import asyncio

    from sbx.client import Client

    async def connected() -> T:
        async with Client(socket, key=key) as client:
            return await work(client)

    return asyncio.run(connected())


def of_sandbox(sandbox_id: str, *rest: str) -> str:
    """The path of a sandbox, or of something in it; ids and names may hold any character."""
    return "/v1/sandboxes/" + "/".join(_part(part) for part in (not_empty(sandbox_id), *rest))


def not_empty(sandbox_id: str) -> str:
    """Raises BadRequest for an empty id, which would be another path."""
    if not sandbox_id:
        raise BadRequest("the id of a sandbox is empty", hint="sbx ps lists them")
    return sandbox_id


def of_admin(*parts: str) -> str:
    """The path of what only the operator may ask for."""
    return "/v1/admin/" + "/".join(_part(part) for part in parts)


def _part(name: str) -> str:
    """As one part of a path: whoever reads it folds a bare `..`, however it was escaped."""
    if name in (".", ".."):
        raise BadRequest(f"{name} is the name of nothing", hint="sbx ps lists the sandboxes")
    return quote(name, safe="", errors="surrogateescape")


def seconds(text: str, option: str) -> float:
    """A time as people write it: 90, 90s, 10min, 2h, 1d. Raises BadRequest."""
    try:
        value = float(text)
    except ValueError:
        from sbx.policy.units import parse_duration

        try:
            value = parse_duration(text)
        except ValueError as error:
            raise BadRequest(
                f"{option}: {error}", hint="write it as 90, 90s, 10min, 2h or 1d"
            ) from None
    if not 0 < value < float("inf"):
        raise BadRequest(f"{option} {text}: a time is longer than nothing, and ends")
    return value
