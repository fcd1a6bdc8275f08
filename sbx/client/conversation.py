"""One conversation of a sandbox over there: the methods of the embedded `Conversation`."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sbx.client import checks
from sbx.client.commands import RemoteCommands
from sbx.client.contexts import RemoteContexts
from sbx.client.conversation_calls import ConversationCalls, RemoteRuns, SandboxState, receipt_from
from sbx.client.dry_runs import RemoteCheckpoint, RemoteDryRun, checkpoint, dry_run
from sbx.client.errors import failure
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.http import connection_lost, query, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.runs import RemoteRun
from sbx.client.terminals import RemoteTerminals
from sbx.errors import Broken
from sbx.protocol.events import text_to_json
from sbx.protocol.receipt import Receipt
from sbx.protocol.usage import SandboxUsage, usage_from_json
from sbx.run_methods import ScriptMethods


# What a sandbox over there uses.
async def usage(held: SandboxState, path: str) -> SandboxUsage:
    """`path` is that of the conversation."""
    held.check()
    return _usage((await held.wire.call("GET", f"{path}/usage")).json())


async def stream_usage(
    held: SandboxState, path: str, interval_s: float
) -> AsyncGenerator[SandboxUsage, None]:
    """One now, and one after each interval. A connection that breaks ends it: Unavailable."""
    held.check()
    address = f"{path}/usage{query({'interval_s': interval_s})}"
    silence_s = max(60.0, interval_s)
    try:
        async with aclosing(held.wire.events("GET", address, silence_s=silence_s)) as events:
            async for _, kind, data in events:
                if kind == "failure":
                    raise failure(data)
                yield _usage(json.loads(data))
    except ConnectionLost as lost:
        raise connection_lost(held.wire.address, str(lost)) from lost


def _usage(told: Mapping[str, Any]) -> SandboxUsage:
    try:
        return usage_from_json(told)
    except (ValueError, TypeError) as error:
        raise Broken(f"a usage that is none: {error}", code="foreign_reply") from error


class RemoteConversation(RemoteRuns, ScriptMethods[RemoteRun]):
    """A workspace with a kernel, in a service. Its methods may be called concurrently from one
    event loop."""

    def __init__(self, held: SandboxState, name: str) -> None:
        self.name = checks.name(name)
        self._held = held
        self._wire = held.wire
        self._talk = ConversationCalls(held, name)
        self._path = self._talk.path
        self.files = RemoteFiles(held.wire, held.check, self._path)
        self.uploads = RemoteUploads(held.wire, held.check, self._path)
        self.contexts = RemoteContexts(self._talk)
        self.commands = RemoteCommands(held, self._path)
        self.terminals = RemoteTerminals(held, self._talk)
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel, as last told here by `start` or
        `read_receipt`: a property cannot ask the service."""
        return self._receipt

    async def read_receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel; None while there is none."""
        self._held.check()
        reply = await self._wire.call("GET", f"{self._path}/receipt")
        told = reply.json()["receipt"]
        self._receipt = None if told is None else receipt_from(told)
        return self._receipt

    # -- runs -------------------------------------------------------------------------------------

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        self._held.check()
        reply = await self._wire.call("POST", f"{self._path}/interrupt")
        return bool(reply.json()["interrupted"])

    async def write_stdin(self, run_id: str, text: str | None) -> None:
        """Feed the standard input of a command that was started with `stdin_open`, by the id of its
        run; None closes it. Raises Conflict `stdin_full` while the command does not read,
        `stdin_closed`, NotFound."""
        self._held.check()
        told = None if text is None else text_to_json(checks.text(text, "stdin"))
        path = target("v1", "sandboxes", self._held.sandbox_id, "runs", run_id, "stdin")
        await self._wire.call("POST", path, body=json.dumps({"text": told}).encode("ascii"))

    # -- what a command would do, and undoing -----------------------------------------------------

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> RemoteDryRun:
        """Run a shell command on a frozen copy of the files, in a jail of its own and without
        network: what it printed, and what it would change. `commit` makes that real, all or none.
        """
        return await dry_run(self._talk, command, timeout, cwd)

    async def checkpoint(self) -> RemoteCheckpoint:
        """The files as they are now; `restore` makes them so again, all or none. The last few are
        kept."""
        return await checkpoint(self._talk)

    # -- what it uses -----------------------------------------------------------------------------

    async def usage(self) -> SandboxUsage:
        """What its sandbox uses now, and the disk of this conversation; nothing starts for it."""
        return await usage(self._held, self._path)

    def stream_usage(self, interval_s: float = 1.0) -> AsyncGenerator[SandboxUsage, None]:
        """The same now and after each interval (0.2 to 3600 seconds), until it is closed."""
        return stream_usage(self._held, self._path, interval_s)

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> Receipt:
        """Start the kernel now instead of with the first run; its receipt."""
        told = await self._talk.call_until_done(f"{self._path}/start", b"")
        self._receipt = receipt_from(told["receipt"])
        return self._receipt

    async def stop(self) -> None:
        """End the kernel and what runs in it; files stay, and the next run starts another."""
        self._held.check()
        await self._wire.call("POST", f"{self._path}/stop", again=True)
        self.forget_receipt()

    def forget_receipt(self) -> None:
        """The kernel it spoke of was stopped."""
        self._receipt = None
