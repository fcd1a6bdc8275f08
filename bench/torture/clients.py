"""The work of one client: it owns its sandboxes, its files in them and its conversation."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from bench.torture import model
from bench.torture.ledger import NEVER_SENT, Act
from bench.torture.looks import Credential, counters, history, read_file, use
from bench.torture.service_process import ServiceUnderTest
from bench.torture.wire import Json, Wire

_PATHS = 8  # of a sandbox, in use at once
_SIZES = (100, 10_000, 200_000)
_RUNS_MAX = 120  # of a sandbox, then it is replaced
_ATTEMPTS = 4  # of a request with an Idempotency-Key
_DOWN_S = 0.3  # after a connection was refused
_TIMEOUT_S = 20  # of a run
_TERMINALS = 2


@dataclass(slots=True)
class Credentials:
    """Those of all clients: any of them tries any other's."""

    all: list[Credential] = field(default_factory=list)


@dataclass(slots=True)
class _Box:
    id: str
    paths: list[str] = field(default_factory=list)
    terminals: list[str] = field(default_factory=list)
    names: int = 0
    runs: int = 0

    @property
    def top(self) -> str:
        return f"/v1/sandboxes/{self.id}"

    @property
    def talk(self) -> str:
        return f"{self.top}/conversations/default"


def over_tcp(client: int) -> bool:
    """Return whether this client comes over TCP with a key, which makes it another owner."""
    return client % 3 == 0


def session(client: int) -> tuple[str, str, str]:
    """User, agent and conversation of the chats of a client."""
    return f"user{client}", "torture", f"talk{client}"


def talk_of(client: int) -> str:
    """Return the place of the files of these chats."""
    user, agent, conversation = session(client)
    return f"sb-session-{user}-{agent}/conversations/{conversation}"


class Client:
    """One of many; `random` decides all that it does. It pauses up to `pause_s` after each act."""

    def __init__(
        self,
        service: ServiceUnderTest,
        http: httpx.AsyncClient,
        number: int,
        random: Random,
        credentials: Credentials,
        *,
        pause_s: float,
    ) -> None:
        self._wire = Wire(service, http, number)
        self._service = service
        self._number = number
        self._random = random
        self._credentials = credentials
        self._pause_s = pause_s
        self._box: _Box | None = None
        self._keys = 0

    async def work(self, until: float) -> None:
        """Do one thing after the other."""
        works: list[tuple[int, Callable[[_Box], Awaitable[Act | None]]]] = [
            (20, self._run),
            (10, self._run_once),
            (6, self._run_followed),
            (16, self._write),
            (12, self._read),
            (6, self._delete_file),
            (5, self._chat),
            (4, self._open_terminal),
            (3, self._close_terminal),
            (4, self._make_credential),
            (3, self._revoke_credential),
            (10, self._use_credential),
            (3, self._delete_sandbox),
        ]
        weights, acts = zip(*works, strict=True)
        while self._service.now() < until:
            box = self._box or await self._create_sandbox()
            if box is None:
                await asyncio.sleep(_DOWN_S)
                continue
            work = self._random.choices(acts, weights)[0]
            act = await (self._delete_sandbox if box.runs > _RUNS_MAX else work)(box)
            down = act is not None and act.code == NEVER_SENT
            await asyncio.sleep(_DOWN_S if down else self._random.random() * self._pause_s)

    # -- sandboxes --------------------------------------------------------------------------------

    async def _create_sandbox(self) -> _Box | None:
        key = self._key()
        for _ in range(_ATTEMPTS):
            act = await self._wire.call(
                "sandbox.create",
                f"?{key}",
                "POST",
                "/v1/sandboxes",
                key=key,
                seen=lambda reply: reply.json()["id"],
                json={"ttl": 86_400},
                headers={"idempotency-key": key},
            )
            if act.outcome == "done":
                self._box = _Box(act.seen)
                return self._box
            await asyncio.sleep(_DOWN_S)
        return None

    async def _delete_sandbox(self, box: _Box) -> Act | None:
        """Delete it, once its counters and its history were read: they go with it."""
        counted = await counters(self._wire, box.id, f"{box.id}/conversations/default")
        if counted.status not in (200, 404) or (await history(self._wire, box.id)).status != 200:
            return counted
        act = await self._wire.call("sandbox.delete", box.id, "DELETE", box.top)
        self._box = None
        return act

    # -- runs -------------------------------------------------------------------------------------

    async def _run(self, box: _Box) -> Act:
        return await self._exec(box, self._key(), {})

    async def _run_once(self, box: _Box) -> Act:
        """Run code under an Idempotency-Key, again until there is a reply, and perhaps once
        more."""
        key, repeats = self._key(), self._random.random() < 0.3
        request, path = self._code(key)
        for _ in range(_ATTEMPTS):
            act = await self._sent(box, key, path, request, {"idempotency-key": key})
            if act.outcome == "done" or act.code == "outcome_unknown":
                break
            await asyncio.sleep(_DOWN_S)
        if act.outcome == "done" and repeats:
            act = await self._sent(box, key, path, request, {"idempotency-key": key})
        return act

    async def _run_followed(self, box: _Box) -> Act:
        box.runs += 1
        key = self._key()
        request, path = self._code(key)
        return await self._wire.follow(
            "run",
            box.id,
            f"{box.top}/{path}",
            request,
            key=key,
            seen=_run_of_events,
            complete=lambda event: event.get("type") == "run_end",
        )

    async def _exec(self, box: _Box, key: str, headers: dict[str, str]) -> Act:
        request, path = self._code(key)
        return await self._sent(box, key, path, request, headers)

    async def _sent(
        self, box: _Box, key: str, path: str, request: Json, headers: dict[str, str]
    ) -> Act:
        box.runs += 1
        return await self._wire.call(
            "run",
            box.id,
            "POST",
            f"{box.top}/{path}",
            key=key,
            seen=lambda reply: _run_of(reply.json()),
            json=request,
            headers=headers,
        )

    def _code(self, key: str) -> tuple[Json, str]:
        """Code that increments the counter `key`, and its path."""
        wait_s = self._random.choice((0.0, 0.0, 0.1, 1.0))
        if self._random.random() < 0.3:
            command = f"mkdir -p c && printf x >> c/{key} && sleep {wait_s} && echo {key}"
            return {"command": command, "timeout": _TIMEOUT_S}, "shell/exec"
        return {"code": _increment(key, wait_s), "timeout": _TIMEOUT_S}, "python/exec"

    # -- files ------------------------------------------------------------------------------------

    async def _write(self, box: _Box) -> Act:
        if len(box.paths) < _PATHS:
            box.names += 1
            box.paths.append(f"f{box.names}")
        path = self._random.choice(box.paths)
        content = self._random.randbytes(self._random.choice(_SIZES))
        seen = hashlib.sha256(content).hexdigest()
        target = f"{box.id}/{path}"
        if self._random.random() < 0.5:
            act = await self._wire.call(
                "file.write",
                target,
                "PUT",
                f"{box.talk}/files",
                seen=seen,
                params={"path": path},
                content=content,
            )
        else:
            act = await self._wire.call(
                "file.write",
                target,
                "POST",
                f"{box.top}/filesystem/upload",
                seen=seen,
                data={"path": path},
                files={"file": (path, content)},
            )
        return self._retire(box, path, act)

    async def _read(self, box: _Box) -> Act | None:
        if not box.paths:
            return None
        path = self._random.choice(box.paths)
        return await read_file(self._wire, box.id, path, native=self._random.random() < 0.5)

    async def _delete_file(self, box: _Box) -> Act | None:
        if not box.paths:
            return None
        path = self._random.choice(box.paths)
        act = await self._wire.call(
            "file.delete",
            f"{box.id}/{path}",
            "DELETE",
            f"{box.top}/filesystem/files",
            params={"path": path},
        )
        return self._retire(box, path, act)

    def _retire(self, box: _Box, path: str, act: Act) -> Act:
        """Leave a file alone whose state is not known: an act without a reply may still be going on
        and take effect after the next one."""
        if act.outcome == "unknown":
            box.paths.remove(path)
        return act

    # -- chats ------------------------------------------------------------------------------------

    async def _chat(self, _: _Box) -> Act:
        key = self._key()
        user, agent, conversation = session(self._number)
        body = {
            "user_id": user,
            "agent_id": agent,
            "conversation_id": conversation,
            "message": model.message(_increment(key, 0.0), f"answer-{key}"),
        }

        def seen(events: list[Json]) -> Any:
            reason = events[-1].get("reason") if events else None
            return {
                "success": reason == "done" and _tool_succeeded(events),
                "answer": f"answer-{key}",
            }

        return await self._wire.follow(
            "chat",
            talk_of(self._number),
            "/api/v1/chat",
            body,
            key=key,
            seen=seen,
            complete=lambda event: event.get("type") == "run_end",
        )

    # -- terminals --------------------------------------------------------------------------------

    async def _open_terminal(self, box: _Box) -> Act | None:
        if len(box.terminals) >= _TERMINALS:
            return await self._close_terminal(box)
        act = await self._wire.call(
            "terminal.open",
            box.id,
            "POST",
            f"{box.talk}/terminals",
            seen=lambda reply: reply.json()["id"],
            json={"command": "sleep 600"},
        )
        if act.outcome == "done":
            box.terminals.append(act.seen)
        return act

    async def _close_terminal(self, box: _Box) -> Act | None:
        if not box.terminals:
            return None
        terminal = box.terminals.pop()
        path = f"{box.talk}/terminals/{terminal}"
        return await self._wire.call("terminal.close", box.id, "DELETE", path, seen=terminal)

    # -- keys and tokens --------------------------------------------------------------------------

    async def _make_credential(self, _: _Box) -> Act:
        key = self._key()
        kind, field_, body = self._random.choice(
            (
                ("keys", "key", {"owner": f"owner-{key}"}),
                ("tokens", "token", {"owner": f"owner-{key}", "user_id": "someone"}),
            )
        )
        act = await self._wire.call(
            "credential.make",
            f"?{key}",
            "POST",
            f"/v1/admin/{kind}",
            key=key,
            seen=lambda reply: (reply.json()["id"], reply.json()[field_]),
            json=body,
        )
        if act.outcome == "done":
            name, text = act.seen
            self._credentials.all.append(Credential(name, text, f"/v1/admin/{kind}/{name}"))
        return act

    async def _revoke_credential(self, _: _Box) -> Act | None:
        if not self._credentials.all:
            return None
        credential = self._random.choice(self._credentials.all[-20:])
        return await self._wire.call(
            "credential.revoke",
            credential.id,
            "DELETE",
            credential.path,
            seen=lambda reply: reply.status_code == 204 or reply.json().get("recorded", True),
        )

    async def _use_credential(self, _: _Box) -> Act | None:
        if not self._credentials.all:
            return None
        return await use(self._wire, self._random.choice(self._credentials.all[-40:]))

    def _key(self) -> str:
        self._keys += 1
        return f"k{self._number}-{self._keys}"


def _increment(key: str, wait_s: float) -> str:
    return (
        "import os, time\n"
        "os.makedirs('c', exist_ok=True)\n"
        f"with open('c/{key}', 'a') as file: file.write('x')\n"
        f"time.sleep({wait_s})\n"
        f"print('{key}')"
    )


def _run_of(body: Json) -> Json:
    seen = {name: body.get(name) for name in ("success", "output")}
    recorded = {} if body.get("recorded") is not False else {"recorded": False}
    return {"id": body.get("execution_id"), **seen, **recorded}


def _run_of_events(events: list[Json]) -> Json | None:
    """Return the result of a run that was followed, as far as it came."""
    if events and events[-1].get("type") == "run_end":
        return _run_of(events[-1])
    started = next((event for event in events if event.get("type") == "run_start"), None)
    return None if started is None else {"id": _execution_id(started["run_id"]), "success": None}


def _execution_id(run_id: str) -> str:
    return run_id.replace("run-", "exec-", 1)


def _tool_succeeded(events: list[Json]) -> bool:
    """Return whether the tool that the model called did its work."""
    ends = [event for event in events if event.get("type") == "tool_end"]
    return bool(ends) and not ends[-1]["is_error"]
