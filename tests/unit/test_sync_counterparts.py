"""The synchronous classes name methods that both kinds of sandboxes have, with equal parameters."""

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_type

import pytest

from sbx.client.client import Client
from sbx.client.commands import RemoteCommand, RemoteCommands
from sbx.client.contexts import RemoteContext, RemoteContexts
from sbx.client.conversation import RemoteConversation
from sbx.client.dry_runs import RemoteCheckpoint, RemoteDryRun
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.grants import RemoteGrants
from sbx.client.sandbox import RemoteSandbox
from sbx.client.terminal_socket import RemoteAttached
from sbx.client.terminals import RemoteTerminal, RemoteTerminals
from sbx.policy.grants import Grants
from sbx.protocol.runs import Event, Run
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.files import WorkspaceFiles, WorkspaceUploads
from sbx.runtime.processes.commands import BackgroundCommand, Commands
from sbx.runtime.processes.terminal import Terminal, TerminalClient
from sbx.runtime.processes.terminals import Terminals
from sbx.runtime.run.context import Context
from sbx.runtime.run.contexts import Contexts
from sbx.runtime.sandbox import AsyncSandbox
from sbx.runtime.snapshots.checkpoints import Checkpoint
from sbx.runtime.snapshots.dry_run import DryRun
from sbx.sync import blocking
from sbx.sync.blocking import BlockingContext, BlockingSandbox
from sbx.sync.client import BlockingClient, ConnectedFiles, ConnectedSandbox, ConnectedUploads
from sbx.sync.methods import Blocking, Method

if TYPE_CHECKING:
    from sbx import Sandbox

COUNTERPARTS: dict[type[Blocking], tuple[type, ...]] = {
    blocking.BlockingFiles: (WorkspaceFiles, RemoteFiles),
    blocking.BlockingUploads: (WorkspaceUploads, RemoteUploads),
    blocking.BlockingCommand: (BackgroundCommand, RemoteCommand),
    blocking.BlockingCommands: (Commands, RemoteCommands),
    blocking.BlockingTerminalClient: (TerminalClient, RemoteAttached),
    blocking.BlockingTerminal: (Terminal, RemoteTerminal),
    blocking.BlockingTerminals: (Terminals, RemoteTerminals),
    blocking.BlockingDryRun: (DryRun, RemoteDryRun),
    blocking.BlockingCheckpoint: (Checkpoint, RemoteCheckpoint),
    blocking.BlockingGrants: (Grants, RemoteGrants),
    BlockingContext: (Context, RemoteContext),
    blocking.BlockingContexts: (Contexts, RemoteContexts),
    blocking.BlockingConversation: (Conversation, RemoteConversation),
    BlockingSandbox: (AsyncSandbox, RemoteSandbox),
    ConnectedFiles: (RemoteFiles,),
    ConnectedUploads: (RemoteUploads,),
    ConnectedSandbox: (RemoteSandbox,),
    BlockingClient: (Client,),
}
# What only one kind has: a caller that passes it to the other gets TypeError.
OWN_PARAMETERS = {
    ("put", "on_progress"),  # of a service
    ("add", "by"),  # of the runtime: a service knows its caller
    ("start_run", "live"),  # of the runtime, for its service
}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(kind, value, id=f"{kind.__name__}.{name}")
        for kind in COUNTERPARTS
        for name, value in inspect.getmembers(kind, lambda value: isinstance(value, Method))
    ],
)
def test_counterparts_have_the_method_with_equal_parameters(
    kind: type[Blocking], method: Method[..., object]
) -> None:
    name = method._name
    shown = [
        [
            (one.name, one.kind, one.default)
            for one in inspect.signature(getattr(inner, name)).parameters.values()
            if (name, one.name) not in OWN_PARAMETERS
        ]
        for inner in COUNTERPARTS[kind]
    ]
    assert all(one == shown[0] for one in shown)


def typed(sandbox: "Sandbox", client: BlockingClient) -> None:
    """Checked by mypy: callers get the types of the asynchronous methods."""
    assert_type(sandbox.run("1", timeout=2.0), Run)
    assert_type(sandbox.stream("1"), Iterator[Event])
    assert_type(sandbox.files.read("a"), str)
    assert_type(sandbox.contexts.list(), list[BlockingContext])
    assert_type(client.create("default", ttl_s=3.0), ConnectedSandbox)
    sandbox.run("1", wall_time=2.0)  # type: ignore[call-arg]
    sandbox.files.read(1)  # type: ignore[arg-type]
