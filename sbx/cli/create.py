"""`sbx create`: create a sandbox in a running service."""

import tomllib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.run import variables
from sbx.cli.terminal import scrub
from sbx.errors import BadRequest


def create(
    policy: Annotated[
        str, typer.Option(help="The name of a policy of the service.", metavar="POLICY")
    ] = "default",
    ttl: Annotated[
        str | None,
        typer.Option(help="The lifetime: 3600, 90s, 2h. Default: until sbx rm.", metavar="TIME"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="An environment variable. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    narrow: Annotated[
        list[str] | None,
        typer.Option(
            help="Narrow the policy, such as limits.memory_max=256MiB. Repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    workspace_id: Annotated[
        str | None, typer.Option(help="An existing workspace for its files.", metavar="ID")
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Create a sandbox, and print its id.

    It uses almost no resources until the first run, which starts a kernel.
    """
    request: dict[str, Any] = {"profile": policy}
    if ttl is not None:
        request["ttl"] = connect.whole_seconds(ttl, "--ttl")
    if env:
        request["env"] = variables(env)
    if narrow:
        request["narrower"] = narrower(narrow)
    if workspace_id is not None:
        request["cargo_id"] = workspace_id

    box = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/sandboxes", json=request)
    )
    output.outcome(box, scrub(box["id"]), as_json=as_json)
    return exits.Exit.OK


def narrower(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `a.b=value` pairs into nested tables. A value is parsed as TOML, or else it is text."""
    tables: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        *above, last = name.strip().split(".")
        if not equals or not last:
            raise BadRequest(
                f"--narrow {pair}: the value is missing",
                hint="write it as limits.memory_max=256MiB",
            )
        try:
            value: Any = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        table = tables
        for part in above:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadRequest(f"--narrow {pair}: {part} already has a value")
        table[last] = value
    return tables
