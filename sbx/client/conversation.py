"""One conversation of a sandbox over there: the methods of the embedded `Conversation`."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sbx import errors
from sbx.client import checks
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.runs import OnInput, RemoteRun
from sbx.client.wire import Wire, target
from sbx.protocol.events import run_from_json
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Event, Run

_LOOK_S = 60.0  # a call that waits for longer asks whether the service is still there
_HEALTH_S = 10.0


@dataclass(slots=True, eq=False)
class Held:
    """What the conversations of one sandbox share on this side."""

    wire: Wire
    sandbox_id: str
    runs: set[RemoteRun] = field(default_factory=set)
    closed: bool = False

    def check(self) -> None:
        """Raises Closed, Broken `used_after_fork`."""
        self.wire.check()
        if self.closed:
            raise errors.Closed(
                f"the {self.sandbox_id} is closed",
                hint="make a new one: its files and state are gone",
            )


class RemoteConversation:
    """A workspace with a kernel, in a service. Its methods may be called concurrently from one
    event loop."""

    def __init__(self, held: Held, name: str) -> None:
        self.name = checks.name(name)
        self._held = held
        self._wire = held.wire
        self._path = target("v1", "sandboxes", held.sandbox_id, "conversations", name)
        self._runs = f"{self._path}/runs"
        self.files = RemoteFiles(held.wire, held.check, self._path)
        self.uploads = RemoteUploads(held.wire, held.check, self._path)
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
            return await self._awaited(self.start_run(code, timeout=timeout, on_input=on_input))
        return await self._run(_cell(code, timeout, interactive=False))

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
        return await self._run(_command(command, timeout, cwd, env, stdin))

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> AsyncIterator[Event]:
        """Run a command and follow it live; the last event carries the result."""
        run = self.start_shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        return run.events()

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        self._held.check()
        reply = await self._wire.call("POST", f"{self._path}/interrupt")
        return bool(reply.json()["interrupted"])

    def start_run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> RemoteRun:
        """Begin a cell; the run goes on whether or not anybody follows it."""
        return self._begun(_cell(code, timeout, interactive=on_input is not None), on_input)

    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> RemoteRun:
        """Begin a shell command; the run goes on whether or not anybody follows it."""
        return self._begun(_command(command, timeout, cwd, env, stdin), None)

    async def give_up(self, run: RemoteRun) -> None:
        """Nobody waits for this run any more: interrupt it, also while it waits for its turn."""
        await run.interrupt()

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> Receipt:
        """Start the kernel now instead of with the first run; its receipt."""
        self._held.check()
        told = await self._patiently(f"{self._path}/start", b"")
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

    # -- one run ----------------------------------------------------------------------------------

    async def _run(self, ask: dict[str, Any]) -> Run:
        """In one exchange. When the caller goes the connection is cut, which is what `attended`
        lets the service take for an interrupt of this very run."""
        self._held.check()
        ask["attended"] = True
        told = await self._patiently(self._runs, _encoded(ask))
        try:
            return run_from_json(told)
        except ValueError as error:
            raise errors.Broken(
                f"the service told of a run that is none: {error}", code="foreign_reply"
            ) from error

    def _begun(self, ask: dict[str, Any], on_input: OnInput | None) -> RemoteRun:
        self._held.check()
        ask["stream"] = True
        held = self._held
        run = RemoteRun(self._wire, held.sandbox_id, (self._runs, _encoded(ask)), on_input)
        held.runs.add(run)
        run.task.add_done_callback(lambda _: held.runs.discard(run))
        return run

    async def _awaited(self, run: RemoteRun) -> Run:
        try:
            return await run.result()
        except asyncio.CancelledError:
            await asyncio.shield(self.give_up(run))
            raise

    async def _patiently(self, path: str, body: bytes) -> Any:
        """POST what may take as long as its policy lets it, in a queue too. A service that is
        merely slow is waited for; one that does not even answer /health is not."""
        reply = await self._wire.call(
            "POST", path, body=body, timeout_s=_LOOK_S, still_there=self._look
        )
        return reply.json()

    async def _look(self) -> None:
        await self._wire.call("GET", "/health", timeout_s=_HEALTH_S)


def receipt_from(told: Mapping[str, Any]) -> Receipt:
    """Raises Broken `foreign_reply`."""
    try:
        return Receipt(**{**told, "walls": tuple(told["walls"])})
    except (TypeError, KeyError) as error:
        raise errors.Broken(f"a receipt that is none: {error}", code="foreign_reply") from error


def _cell(code: str, timeout: float | None, *, interactive: bool) -> dict[str, Any]:
    ask: dict[str, Any] = {"kind": "python", "code": checks.text(code, "code")}
    if (seconds := checks.timeout(timeout)) is not None:
        ask["timeout"] = seconds
    if interactive:
        ask["interactive"] = True
    return ask


def _command(
    command: str,
    timeout: float | None,
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: str | None,
) -> dict[str, Any]:
    given = {
        "kind": "shell",
        "code": checks.text(command, "command"),
        "timeout": checks.timeout(timeout),
        "cwd": cwd if cwd is None else checks.path(cwd),
        "env": checks.environment(env),
        "stdin": stdin if stdin is None else checks.text(stdin, "stdin"),
    }
    return {name: value for name, value in given.items() if value is not None}


def _encoded(ask: dict[str, Any]) -> bytes:
    return json.dumps(ask, ensure_ascii=False, separators=(",", ":")).encode()
