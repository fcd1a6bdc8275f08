"""The requests of one conversation: its runs, and calls that take as long as a run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sbx import errors
from sbx.client import checks
from sbx.client.http import HttpClient, target
from sbx.client.runs import RemoteRun
from sbx.protocol.events import run_from_json
from sbx.protocol.languages import check_arguments, check_language
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Run
from sbx.run_methods import OnInput, RunCall, RunMethods

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


class RemoteRuns(RunMethods[RemoteRun]):
    """The runs of a conversation, or of one context of it, in a service."""

    _talk: ConversationCalls
    _context: str | None = None

    def start_call(self, call: RunCall) -> RemoteRun:
        return self._talk.begin(_body(call, self._context), call.on_input)

    async def run_call(self, call: RunCall) -> Run:
        if call.on_input is not None:
            return await super().run_call(call)
        return await self._talk.run(_body(call, self._context))

    async def give_up(self, run: RemoteRun, /) -> None:
        """Interrupt a run, also while it waits for its turn."""
        await run.interrupt()


def _body(call: RunCall, context: str | None) -> dict[str, Any]:
    """Raise BadRequest, TooLarge and InvalidPath for arguments that the service need not see."""
    fields = {
        "kind": check_language(call.language) if call.kind == "script" else call.kind,
        "code": checks.text(call.code, "command" if call.kind == "shell" else "code"),
        "args": list(check_arguments(call.args)) or None,
        "timeout": checks.timeout(call.timeout),
        "cwd": call.cwd if call.cwd is None else checks.path(call.cwd),
        "env": checks.environment(call.env),
        "stdin": call.stdin if call.stdin is None else checks.text(call.stdin, "stdin"),
        "stdin_open": call.stdin_open or None,
        "interactive": call.on_input is not None or None,
        "context": context,
    }
    return {name: value for name, value in fields.items() if value is not None}


def encoded(ask: dict[str, Any]) -> bytes:
    return json.dumps(ask, ensure_ascii=False, separators=(",", ":")).encode()
