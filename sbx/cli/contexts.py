"""`sbx context`: the kernels of a conversation, side by side over its files."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sbx.cli import exits, reach, report
from sbx.cli.terminal import one_line

if TYPE_CHECKING:
    from sbx.client.contexts import RemoteContexts

T = TypeVar("T")
app = typer.Typer(
    help="Make, list, restart and delete kernels beside the first one.", rich_markup_mode=None
)
Name = Annotated[str, typer.Argument(help="As in sbx context list.", metavar="NAME")]


@app.command("list")
def list_contexts(
    sandbox_id: reach.Id,
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """The contexts of a conversation, `default` first."""
    path = reach.of_sandbox(sandbox_id, "conversations", conversation, "contexts")
    told = reach.ask(socket, key, lambda client: client.request("GET", path))
    if as_json:
        report.document({"contexts": told["items"], "limit": told["limit"]})
        return exits.Exit.OK
    from sbx.cli.tables import print_table

    print_table(("context", "status"), [(one["name"], one["status"]) for one in told["items"]])
    return exits.Exit.OK


@app.command("create")
def create_context(
    sandbox_id: reach.Id,
    name: Annotated[str, typer.Argument(help="A name of your own.", metavar="NAME")],
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Make a context and start its kernel."""
    _of(socket, key, sandbox_id, conversation, lambda contexts: contexts.create(name))
    return _done(name, "created", as_json=as_json)


@app.command("restart")
def restart_context(
    sandbox_id: reach.Id,
    name: Name,
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """End its kernel and what runs in it, and start another: a clean namespace."""

    async def restarted(contexts: "RemoteContexts") -> None:
        await (await contexts.get(name)).restart()

    _of(socket, key, sandbox_id, conversation, restarted)
    return _done(name, "restarted", as_json=as_json)


@app.command("delete")
def delete_context(
    sandbox_id: reach.Id,
    name: Name,
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """End its kernel and what runs in it, for good; files stay."""
    _of(socket, key, sandbox_id, conversation, lambda contexts: contexts.delete(name))
    return _done(name, "deleted", as_json=as_json)


def _of(
    socket: str | None,
    key: str | None,
    sandbox_id: str,
    conversation: str,
    work: "Callable[[RemoteContexts], Awaitable[T]]",
) -> T:
    return reach.ask(
        socket,
        key,
        lambda client: work(client.sandbox(sandbox_id).conversation(conversation).contexts),
    )


def _done(name: str, what: str, *, as_json: bool) -> int:
    report.outcome({"context": name, what: True}, one_line(name), as_json=as_json)
    return exits.Exit.OK
