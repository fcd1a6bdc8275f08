"""The calls of one conversation: its runs, and requests that take as long as a run."""

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sbx import errors
from sbx.client import checks
from sbx.client.errors import decode
from sbx.client.http import HttpClient, target
from sbx.client.runs import RemoteRun
from sbx.protocol.events import run_from_json
from sbx.protocol.languages import check_arguments, check_language
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Run
from sbx.run_methods import OnInput, RunCall, RunMethods

_PING_S = 60.0  # a call that waits for longer checks that the service still answers
_HEALTH_S = 10.0


@dataclass(slots=True, eq=False)
class SandboxState:
    """The state that the conversations of one sandbox share in the client."""

    wire: HttpClient
    sandbox_id: str
    runs: set[RemoteRun] = field(default_factory=set)
    closed: bool = False

    def check(self) -> None:
        """Raise Closed, Broken `used_after_fork`."""
        self.wire.check()
        if self.closed:
            raise errors.Closed(
                f"the {self.sandbox_id} is closed",
                hint="create a new one: its files and state are deleted",
            )


class ConversationCalls:
    """The requests of one conversation. `path` is that of its routes."""

    def __init__(self, state: SandboxState, conversation: str) -> None:
        self.conversation = conversation
        self.path = target("v1", "sandboxes", state.sandbox_id, "conversations", conversation)
        self.state = state
        self._wire = state.wire
        self._runs = f"{self.path}/runs"

    async def call(
        self, method: str, path: str, *, body: bytes = b"", again: bool | None = None
    ) -> Any:
        """Return the JSON of the reply, or None for an empty one. Raise the error of the body,
        Closed."""
        self.state.check()
        return (await self._wire.call(method, path, body=body, again=again)).json()

    async def run(self, request: dict[str, Any]) -> Run:
        """Run code in one exchange. If the call is cancelled, the connection is closed; because of
        `attended`, the service then interrupts this run."""
        request["attended"] = True
        reply = await self.call_until_done(self._runs, encoded(request))
        return decode("run", run_from_json, reply)

    def begin(self, request: dict[str, Any], on_input: OnInput | None) -> RemoteRun:
        self.state.check()
        request["stream"] = True
        state = self.state
        run = RemoteRun(self._wire, state.sandbox_id, (self._runs, encoded(request)), on_input)
        state.runs.add(run)
        run.task.add_done_callback(lambda _: state.runs.discard(run))
        return run

    async def call_until_done(self, path: str, body: bytes) -> Any:
        """Send a POST that may take as long as the policy permits, time in a queue included. Wait
        for a slow service, but not for one that does not even answer /health."""
        self.state.check()
        reply = await self._wire.call(
            "POST", path, body=body, timeout_s=_PING_S, still_there=self._ping
        )
        return reply.json()

    async def _ping(self) -> None:
        await self._wire.call("GET", "/health", timeout_s=_HEALTH_S)


def receipt_of(reply: Mapping[str, Any]) -> Receipt:
    """Return the receipt in a reply. Raise Broken `foreign_reply`."""
    return decode(
        "receipt", lambda data: Receipt(**{**data, "walls": tuple(data["walls"])}), reply["receipt"]
    )


def receipt_or_none(reply: Mapping[str, Any]) -> Receipt | None:
    """Return the receipt in a reply, or None without a kernel. Raise Broken `foreign_reply`."""
    return None if reply["receipt"] is None else receipt_of(reply)


class RemoteRuns(RunMethods[RemoteRun]):
    """The runs of a conversation, or of one context of it, in a service."""

    _calls: ConversationCalls
    _context: str | None = None

    def start_call(self, call: RunCall) -> RemoteRun:
        return self._calls.begin(_body(call, self._context), call.on_input)

    async def run_call(self, call: RunCall) -> Run:
        if call.on_input is not None:
            return await super().run_call(call)
        return await self._calls.run(_body(call, self._context))

    async def give_up(self, run: RemoteRun, /) -> None:
        """Interrupt a run, also while it is queued."""
        await run.interrupt()


def _body(call: RunCall, context: str | None) -> dict[str, Any]:
    """Return the body of the request. Raise BadRequest, TooLarge, InvalidPath."""
    fields = {
        "kind": check_language(call.language) if call.kind == "script" else call.kind,
        "code": checks.text(call.code, "command" if call.kind == "shell" else "code"),
        "source": _base64(call.source),
        "stdin_data": _base64(call.stdin_data),
        "shows_value": call.shows_value or None,
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


def _base64(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def encoded(request: dict[str, Any]) -> bytes:
    return json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode()
