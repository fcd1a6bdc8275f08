"""One conversation of a sandbox in a service, with the methods of the embedded `Conversation`."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from sbx.client import checks
from sbx.client.commands import RemoteCommands
from sbx.client.contexts import RemoteContexts
from sbx.client.conversation_calls import (
    ConversationCalls,
    RemoteRuns,
    SandboxState,
    receipt_of,
    receipt_or_none,
)
from sbx.client.dry_runs import RemoteCheckpoint, RemoteDryRun, checkpoint, dry_run
from sbx.client.errors import decode
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.grants import RemoteGrants
from sbx.client.http import query, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.replies import connection_lost
from sbx.client.runs import RemoteRun
from sbx.client.terminals import RemoteTerminals
from sbx.protocol.events import text_to_json
from sbx.protocol.fields import read_fields
from sbx.protocol.receipt import Receipt
from sbx.protocol.surroundings import Surroundings, surroundings_from_json
from sbx.protocol.usage import SandboxUsage
from sbx.run_methods import ScriptMethods


class RemoteConversation(RemoteRuns, ScriptMethods[RemoteRun]):
    """A workspace with a kernel, in a service. Its methods may be called concurrently from one
    event loop."""

    def __init__(self, state: SandboxState, name: str) -> None:
        self.name = checks.name(name)
        self._state = state
        self._wire = state.wire
        self._calls = ConversationCalls(state, name)
        self._path = self._calls.path
        self.files = RemoteFiles(state.wire, state.check, self._path)
        self.uploads = RemoteUploads(state.wire, state.check, self._path)
        self.contexts = RemoteContexts(self._calls)
        self.commands = RemoteCommands(state, self._path)
        self.terminals = RemoteTerminals(self._calls)
        self.grants = RemoteGrants(self._calls)
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt | None:
        """The walls around the live kernel, from the last `start` or `read_receipt`: a property
        cannot send a request."""
        return self._receipt

    async def read_receipt(self) -> Receipt | None:
        """Return the walls around the live kernel, or None without a kernel."""
        self._receipt = receipt_or_none(await self._calls.call("GET", f"{self._path}/receipt"))
        return self._receipt

    # -- runs -------------------------------------------------------------------------------------

    async def interrupt(self) -> bool:
        """Interrupt the active cell. Return False if no cell is active."""
        return bool((await self._calls.call("POST", f"{self._path}/interrupt"))["interrupted"])

    async def write_stdin(self, run_id: str, text: str | None) -> None:
        """Write to the standard input of a command that was started with `stdin_open`, by the id of
        its run; None closes it. Raise Conflict `stdin_full` while the command does not read,
        `stdin_closed`, NotFound."""
        self._state.check()
        line = None if text is None else text_to_json(checks.text(text, "stdin"))
        path = target("v1", "sandboxes", self._state.sandbox_id, "runs", run_id, "stdin")
        await self._wire.call("POST", path, body=json.dumps({"text": line}).encode("ascii"))

    async def surroundings(self) -> Surroundings:
        """Return the paths, languages and capabilities that code and tools have here."""
        reply = await self._calls.call("GET", f"{self._path}/surroundings")
        return decode("surroundings", surroundings_from_json, reply)

    # -- dry runs and checkpoints -----------------------------------------------------------------

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> RemoteDryRun:
        """Run a shell command on a frozen copy of the files, in a separate jail without network.
        Return its output and its changes. `commit` applies all changes or none."""
        return await dry_run(self._calls, command, timeout, cwd)

    async def checkpoint(self) -> RemoteCheckpoint:
        """Save the current files; `restore` restores all of them or none. Only the last few
        checkpoints are kept."""
        return await checkpoint(self._calls)

    # -- usage ------------------------------------------------------------------------------------

    async def usage(self) -> SandboxUsage:
        """Return the usage of the sandbox and the disk usage of this conversation. No kernel
        starts."""
        return _usage(await self._calls.call("GET", f"{self._path}/usage"))

    async def stream_usage(self, interval_s: float = 1.0) -> AsyncGenerator[SandboxUsage, None]:
        """Yield the usage now and after each interval (0.2 to 3600 seconds). Raise Unavailable if
        the connection is lost."""
        self._state.check()
        path = f"{self._path}/usage{query({'interval_s': interval_s})}"
        silence_s = max(60.0, interval_s)
        try:
            async with aclosing(self._wire.events("GET", path, silence_s=silence_s)) as events:
                async for _, _, data in events:
                    yield _usage(json.loads(data))
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, lost) from lost

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> Receipt:
        """Start the kernel now instead of at the first run. Return its receipt."""
        reply = await self._calls.call_until_done(f"{self._path}/start", b"")
        self._receipt = receipt_of(reply)
        return self._receipt

    async def stop(self) -> None:
        """Stop the kernel and its runs. Files stay, and the next run starts another kernel."""
        await self._calls.call("POST", f"{self._path}/stop", again=True)
        self.forget_receipt()

    def forget_receipt(self) -> None:
        """Remove the receipt of a kernel that was stopped."""
        self._receipt = None


def _usage(reply: Any) -> SandboxUsage:
    return decode("usage", partial(read_fields, SandboxUsage), reply)
