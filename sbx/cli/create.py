"""`sbx create`: create a sandbox in a running service."""

from typing import Annotated, Any

import typer

from sbx.cli import connect, exits, narrowing, output
from sbx.cli.terminal import scrub


def create(
    policy: Annotated[
        str, typer.Option(help="The name of a policy of the service.", metavar="POLICY")
    ] = "default",
    ttl: Annotated[
        str | None,
        typer.Option(help="The lifetime: 3600, 90s, 2h. Default: until sbx rm.", metavar="TIME"),
    ] = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    narrow: Annotated[
        list[str] | None,
        typer.Option(
            help="Narrow another key of the policy, such as limits.tasks_max=8. Repeatable.",
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
    request: dict[str, Any] = {
        "profile": policy,
        **narrowing.sandbox_options(
            memory=memory, cpus=cpus, network_allow=network_allow, env=env, narrow=narrow or ()
        ),
    }
    if ttl is not None:
        request["ttl"] = connect.whole_seconds(ttl, "--ttl")
    if workspace_id is not None:
        request["cargo_id"] = workspace_id

    box = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/sandboxes", json=request)
    )
    output.outcome(box, scrub(box["id"]), as_json=as_json)
    return exits.Exit.OK
