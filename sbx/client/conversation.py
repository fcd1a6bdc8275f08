"""One conversation of a sandbox over there: the methods of the embedded `Conversation`."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from sbx.client import checks
from sbx.client.commands import RemoteCommands
from sbx.client.contexts import RemoteContexts
from sbx.client.dry_runs import RemoteCheckpoint, RemoteDryRun, checkpoint, dry_run
from sbx.client.errors import failure
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.http import connection_lost, query, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.runs import OnInput, RemoteRun
from sbx.client.talk import ConversationCalls, SandboxState, cell, command_line, receipt_from
from sbx.client.terminals import RemoteTerminals
from sbx.errors import Broken
from sbx.protocol.events import text_to_json
from sbx.protocol.languages import check_arguments, check_language
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Event, Run
from sbx.protocol.usage import SandboxUsage, usage_from_json


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


# A script in another language, as the service is asked to run it.
def script(
    code: str,
    language: str,
    *,
    args: Sequence[str],
    timeout: float | None,
    env: Mapping[str, str] | None,
    stdin: str | None,
    cwd: str | None,
) -> dict[str, Any]:
    """The body of a run. Raises what need not be sent to be refused: BadRequest, TooLarge,
    InvalidPath."""
    given = {
        "kind": check_language(language),
        "code": checks.text(code, "code"),
        "args": list(check_arguments(args)) or None,
        "timeout": checks.timeout(timeout),
        "cwd": cwd if cwd is None else checks.path(cwd),
        "env": checks.environment(env),
        "stdin": stdin if stdin is None else checks.text(stdin, "stdin"),
    }
    return {name: value for name, value in given.items() if value is not None}


class RemoteConversation:
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

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Cancelling the call interrupts the cell."""
        if on_input is not None:
            return await self._talk.awaited(
                self.start_run(code, timeout=timeout, on_input=on_input)
            )
        return await self._talk.run(cell(code, timeout, interactive=False))

    def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> AsyncIterator[Event]:
        """Run a cell and follow it live; the last event carries the result. It runs from now on,
        whether or not it is followed to its end."""
        return self.start_run(code, timeout=timeout, on_input=on_input).events()

    async def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run:
        """Run `/bin/bash -c command` beside the kernel and wait for its result."""
        return await self._talk.run(command_line(command, timeout, cwd, env, stdin))

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> AsyncIterator[Event]:
        """Run a command and follow it live; the last event carries the result."""
        run = self.start_shell(
            command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, stdin_open=stdin_open
        )
        return run.events()

    async def run_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> Run:
        """Run a script of `bash`, `javascript`, `typescript`, `java` or `go` beside the kernel, and
        wait for its result. Cancelling the call interrupts it."""
        return await self._talk.run(
            script(code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd)
        )

    def stream_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> AsyncIterator[Event]:
        """Run a script and follow it live; the last event carries the result."""
        return self.start_script(
            code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd
        ).events()

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        self._held.check()
        reply = await self._wire.call("POST", f"{self._path}/interrupt")
        return bool(reply.json()["interrupted"])

    def start_run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> RemoteRun:
        """Begin a cell; the run goes on whether or not anybody follows it."""
        return self._talk.begin(cell(code, timeout, interactive=on_input is not None), on_input)

    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> RemoteRun:
        """Begin a shell command; the run goes on whether or not anybody follows it."""
        return self._talk.begin(
            command_line(command, timeout, cwd, env, stdin, stdin_open=stdin_open), None
        )

    def start_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> RemoteRun:
        """Begin a script; the run goes on whether or not anybody follows it."""
        ask = script(code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd)
        return self._talk.begin(ask, None)

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

    async def give_up(self, run: RemoteRun) -> None:
        """Nobody waits for this run any more: interrupt it, also while it waits for its turn."""
        await run.interrupt()

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
