"""What the faces of one conversation say to the service, and how: runs, calls that take long."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sbx import errors
from sbx.client import checks
from sbx.client.http import HttpClient, target
from sbx.client.runs import OnInput, RemoteRun
from sbx.protocol.events import run_from_json
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Run

_LOOK_S = 60.0  # a call that waits for longer asks whether the service is still there
_HEALTH_S = 10.0


@dataclass(slots=True, eq=False)
class SandboxState:
    """What the conversations of one sandbox share on this side."""

    wire: HttpClient
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


class ConversationCalls:
    """One conversation's way to its service. `path` is that of its routes."""

    def __init__(self, held: SandboxState, conversation: str) -> None:
        self.conversation = conversation
        self.path = target("v1", "sandboxes", held.sandbox_id, "conversations", conversation)
        self._held = held
        self._wire = held.wire
        self._runs = f"{self.path}/runs"

    async def call(self, method: str, path: str, *, again: bool | None = None) -> Any:
        """What the service answers, which may be nothing; raises the error of the body, Closed."""
        self._held.check()
        return (await self._wire.call(method, path, again=again)).json()

    async def run(self, ask: dict[str, Any]) -> Run:
        """In one exchange. When the caller goes the connection is cut, which is what `attended`
        lets the service take for an interrupt of this very run."""
        ask["attended"] = True
        told = await self.call_until_done(self._runs, encoded(ask))
        try:
            return run_from_json(told)
        except ValueError as error:
            raise errors.Broken(
                f"the service told of a run that is none: {error}", code="foreign_reply"
            ) from error

    def begin(self, ask: dict[str, Any], on_input: OnInput | None) -> RemoteRun:
        self._held.check()
        ask["stream"] = True
        held = self._held
        run = RemoteRun(self._wire, held.sandbox_id, (self._runs, encoded(ask)), on_input)
        held.runs.add(run)
        run.task.add_done_callback(lambda _: held.runs.discard(run))
        return run

    async def awaited(self, run: RemoteRun) -> Run:
        try:
            return await run.result()
        except asyncio.CancelledError:
            await asyncio.shield(run.interrupt())
            raise

    async def call_until_done(self, path: str, body: bytes) -> Any:
        """POST what may take as long as its policy lets it, in a queue too. A service that is
        merely slow is waited for; one that does not even answer /health is not."""
        self._held.check()
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


def cell(code: str, timeout: float | None, *, interactive: bool) -> dict[str, Any]:
    ask: dict[str, Any] = {"kind": "python", "code": checks.text(code, "code")}
    if (seconds := checks.timeout(timeout)) is not None:
        ask["timeout"] = seconds
    if interactive:
        ask["interactive"] = True
    return ask


def command_line(
    command: str,
    timeout: float | None,
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: str | None,
    *,
    stdin_open: bool = False,
) -> dict[str, Any]:
    given = {
        "kind": "shell",
        "code": checks.text(command, "command"),
        "timeout": checks.timeout(timeout),
        "cwd": cwd if cwd is None else checks.path(cwd),
        "env": checks.environment(env),
        "stdin": stdin if stdin is None else checks.text(stdin, "stdin"),
        "stdin_open": stdin_open or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def encoded(ask: dict[str, Any]) -> bytes:
    return json.dumps(ask, ensure_ascii=False, separators=(",", ":")).encode()
