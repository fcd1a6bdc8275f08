"""`sbx context`: the kernels of a conversation, which share its files."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import one_line

if TYPE_CHECKING:
    from sbx.client.contexts import RemoteContexts

T = TypeVar("T")
app = typer.Typer(
    help="Create, list, restart and delete additional kernels of a conversation.",
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="The name, from sbx context list.", metavar="NAME")]


@app.command("list")
def list_contexts(
    sandbox_id: connect.Id,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """List the contexts of a conversation, `default` first."""
    path = connect.sandbox_path(sandbox_id, "conversations", conversation, "contexts")
    reply = connect.ask(socket, key, lambda client: client.request("GET", path))
    if as_json:
        output.document({"contexts": reply["items"], "limit": reply["limit"]})
        return exits.Exit.OK
    output.print_table(
        ("context", "status"), [(entry["name"], entry["status"]) for entry in reply["items"]]
    )
    return exits.Exit.OK


@app.command("create")
def create_context(
    sandbox_id: connect.Id,
    name: Annotated[str, typer.Argument(help="A name that you choose.", metavar="NAME")],
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Create a context and start its kernel."""
    _of(socket, key, sandbox_id, conversation, lambda contexts: contexts.create(name))
    return _done(name, "created", as_json=as_json)


@app.command("restart")
def restart_context(
    sandbox_id: connect.Id,
    name: Name,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Stop the kernel of a context with its runs, and start a new kernel without variables."""

    async def restarted(contexts: "RemoteContexts") -> None:
        await (await contexts.get(name)).restart()

    _of(socket, key, sandbox_id, conversation, restarted)
    return _done(name, "restarted", as_json=as_json)


@app.command("delete")
def delete_context(
    sandbox_id: connect.Id,
    name: Name,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Delete a context and stop its kernel with its runs. The files stay."""
    _of(socket, key, sandbox_id, conversation, lambda contexts: contexts.delete(name))
    return _done(name, "deleted", as_json=as_json)


def _of(
    socket: str | None,
    key: str | None,
    sandbox_id: str,
    conversation: str,
    action: "Callable[[RemoteContexts], Awaitable[T]]",
) -> T:
    return connect.ask(
        socket,
        key,
        lambda client: action(client.sandbox(sandbox_id).conversation(conversation).contexts),
    )


def _done(name: str, outcome: str, *, as_json: bool) -> int:
    output.outcome({"context": name, outcome: True}, one_line(name), as_json=as_json)
    return exits.Exit.OK
