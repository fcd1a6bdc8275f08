"""The things of tests/data_matrix.py: how each is created, used, looked at and deleted.

A thing lives in the session of a new user, and its acts are those of the session unless it has some
of its own. Each writes its marker where a caller can write: names, files, code, output, messages.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
from matrix_places import GRACE_S, IDLE_S, PATIENCE_S, TTL_S, Place, error_of, new_mark, new_number
from sessions_calls import API

AGENT = "helper"
STARTED = "it-has-started"
_LONG = f"import time\nprint({STARTED!r}, flush=True)\ntime.sleep(600)"


class Stream:
    """A streamed request that continues in the background."""

    def __init__(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._read(http, url, body))

    async def _read(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        headers = {"accept": "text/event-stream"}
        async with http.stream("POST", url, json=body, headers=headers) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise AssertionError(f"{reply.status_code}: {reply.text}")
            async for event in _events(reply):
                async with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()

    async def until(self, text: str) -> None:
        """Wait for an event that contains the text."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            while not any(text in json.dumps(event) for event in self.events):
                if self._task.done():
                    self._task.result()
                    raise AssertionError(f"it ended without {text!r}: {self.events}")
                waiting = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([waiting, self._task], return_when="FIRST_COMPLETED")
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def end(self) -> dict[str, Any]:
        """Wait for the end; return the last event, which is empty if the service has gone."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(self._task, return_exceptions=True)
        return self.events[-1] if self.events else {}


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


class Thing:
    """One thing in a session. Each act returns the answer to it."""

    config: dict[str, Any] = {}  # of its session
    agent = AGENT
    ends_code = True  # a deletion ends the code that runs

    def __init__(self, place: Place, held: AsyncExitStack) -> None:
        self.place = place
        self.held = held
        self.mark = new_mark()
        self.user = f"user-{new_number()}"
        self.session = f"sb-session-{self.user}-{self.agent}"
        self.conversation = "talk"
        self.running: Stream | None = None

    # -- requests ------------------------------------------------------------------------------

    async def call(self, method: str, url: str, **more: Any) -> httpx.Response:
        return await self.place.http.request(method, url, **more)

    async def ask(self, method: str, url: str, **more: Any) -> str:
        return error_of(await self.call(method, url, **more))

    @property
    def url(self) -> str:
        """Of the session."""
        return f"{API}/sessions/{self.session}"

    @property
    def box(self) -> str:
        """Of its conversation, on the native surface."""
        return f"/v1/sandboxes/{self.session}/conversations/{self.conversation}"

    async def ensure(self) -> httpx.Response:
        body = {"user_id": self.user, "agent_id": self.agent, "config": self.config}
        reply = await self.call("POST", f"{API}/sessions", json=body)
        assert reply.status_code in (200, 201), reply.text
        return reply

    async def execute(self, code: str) -> str:
        body = {"conversation_id": self.conversation, "code": code}
        headers = {"idempotency-key": f"key-{new_mark()}"}
        reply = await self.call("POST", f"{self.url}/execute", json=body, headers=headers)
        if reply.status_code == 200:
            return f"200 {reply.json()['status']}"
        return error_of(reply)

    # -- the acts ------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make everything around the thing."""
        await self.ensure()

    async def create(self) -> str:
        raise NotImplementedError

    async def use(self) -> str:
        raise NotImplementedError

    async def look(self) -> str:
        """Ask for the thing; this starts nothing and changes nothing."""
        raise NotImplementedError

    async def delete(self) -> str:
        raise NotImplementedError

    async def begin(self) -> None:
        """Let code run that is in the way of a deletion."""
        body = {"conversation_id": self.conversation, "code": _LONG}
        self.running = Stream(self.place.http, f"{self.url}/execute", body)
        await self.running.until(STARTED)

    async def end(self) -> str:
        """Return how the code that `begin` started has ended."""
        assert self.running is not None
        if not self.ends_code:
            body = {"conversation_id": self.conversation}
            await self.call("POST", f"{self.url}/interrupt", json=body)
        last = await self.running.end()
        error = last.get("error") or {}
        return f"{last.get('status')} {error.get('name', '')}".strip()

    async def before_restart(self) -> None:
        """Begin what is in progress when the service is killed or copied."""

    async def idle(self) -> None:
        await self.place.later(IDLE_S + 1)

    async def expire(self) -> None:
        await self.place.later(TTL_S + 1)

    async def purge(self) -> None:
        await self.place.later(GRACE_S + 1, collect=True)

    async def restore(self) -> str:
        reply = await self.ensure()
        restored = "restored" if reply.json()["info"]["restored"] else "empty"
        return f"{reply.status_code} {restored}"

    async def stop(self) -> str:
        return await self.ask("POST", f"{self.url}/stop")

    async def extend(self) -> str:
        return await self.ask("POST", f"{self.url}/extend_ttl", json={"extend_by": 3600})


class SandboxThing(Thing):
    """A sandbox of /v1, which is no session."""

    async def prepare(self) -> None:
        self.session = ""

    async def create(self) -> str:
        body = {"ttl": int(TTL_S), "env": {"WORD": self.mark}}
        headers = {"idempotency-key": f"key-{new_mark()}"}
        reply = await self.call("POST", "/v1/sandboxes", json=body, headers=headers)
        self.session = reply.json()["id"]
        return error_of(reply)

    @property
    def url(self) -> str:
        return f"/v1/sandboxes/{self.session}"

    async def use(self) -> str:
        code = f"open('{self.mark}', 'w').write('{self.mark}'); print('{self.mark}')"
        headers = {"idempotency-key": f"key-{new_mark()}"}
        reply = await self.call(
            "POST", f"{self.url}/python/exec", json={"code": code}, headers=headers
        )
        if reply.status_code == 200:
            return "200 ok" if reply.json()["success"] else "200 error"
        return error_of(reply)

    async def look(self) -> str:
        reply = await self.call("GET", self.url)
        return f"200 {reply.json()['status']}" if reply.status_code == 200 else error_of(reply)

    async def delete(self) -> str:
        return await self.ask("DELETE", self.url)

    async def begin(self) -> None:
        self.running = Stream(self.place.http, f"{self.url}/python/exec", {"code": _LONG})
        await self.running.until(STARTED)

    async def end(self) -> str:
        assert self.running is not None
        last = await self.running.end()
        return str(last.get("run", last).get("status"))


class SessionThing(Thing):
    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        return {"env": {"WORD": self.mark}}

    async def prepare(self) -> None:
        pass

    async def create(self) -> str:
        return error_of(await self.ensure())

    async def use(self) -> str:
        return await self.execute(f"open('{self.mark}', 'w').write('{self.mark}')")

    async def look(self) -> str:
        reply = await self.call("GET", self.url)
        return f"200 {reply.json()['status']}" if reply.status_code == 200 else error_of(reply)

    async def delete(self) -> str:
        return await self.ask("DELETE", self.url)


class ConversationThing(Thing):
    async def create(self) -> str:
        return await self.execute(f"open('{self.mark}', 'w').write('{self.mark}')")

    async def use(self) -> str:
        return await self.execute(f"print('{self.mark}')")

    async def look(self) -> str:
        return await self.ask("GET", f"{self.url}/conversations/{self.conversation}/prompt")

    async def delete(self) -> str:
        return await self.ask("DELETE", f"{self.url}/conversations/{self.conversation}")


class UploadThing(Thing):
    ends_code = False

    async def create(self) -> str:
        return await self.ask(
            "POST",
            f"{self.url}/files/upload",
            data={"conversation_id": self.conversation},
            files={"file": (f"{self.mark}.txt", self.mark.encode())},
        )

    async def use(self) -> str:
        return await self.execute(
            "import pathlib\n"
            "for path in pathlib.Path('uploads/temparea').iterdir(): path.read_bytes()"
        )

    async def look(self) -> str:
        params = {"conversation_id": self.conversation}
        return await self.ask("GET", f"{self.url}/files/{self.mark}.txt", params=params)

    async def delete(self) -> str:
        params = {"conversation_id": self.conversation}
        return await self.ask("DELETE", f"{self.url}/files/{self.mark}.txt", params=params)
