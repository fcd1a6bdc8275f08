"""The things of tests/data_matrix.py: how each is created, used, looked at and deleted.

A thing lives in the session of a new user, and its acts are those of the session unless it has some
of its own. Each writes its marker where a caller can write: names, files, code, output, messages.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any, ClassVar

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
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read(http, url, body))

    async def _read(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        headers = {"accept": "text/event-stream"}
        try:
            async with http.stream("POST", url, json=body, headers=headers) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise AssertionError(f"{reply.status_code}: {reply.text}")
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
                        self._changed.set()
        finally:
            self._changed.set()

    @property
    def is_open(self) -> bool:
        return not self._task.done()

    async def until(self, text: str) -> None:
        """Wait for an event that contains the text."""
        async with asyncio.timeout(PATIENCE_S):
            while not any(text in json.dumps(event) for event in self.events):
                if not self.is_open:
                    self._task.result()
                    raise AssertionError(f"it ended without {text!r}: {self.events}")
                await self._changed.wait()
                self._changed.clear()
                await asyncio.sleep(0)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def end(self) -> dict[str, Any]:
        """Wait for the end; return the last event, which is empty if the service has gone."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(self._task, return_exceptions=True)
        return self.events[-1] if self.events else {}


class Thing:
    """One thing in a session. Each act returns the answer to it."""

    config: ClassVar[dict[str, Any]] = {}  # of its session
    agent = AGENT
    ends_code = True  # a deletion ends the code that runs

    def __init__(self, place: Place, held: AsyncExitStack) -> None:
        self.place = place
        self.held = held
        self.mark = new_mark()
        self.user = f"user-{new_number():05}"
        self.session = f"sb-session-{self.user}-{self.agent}"
        self.conversation = f"talk-{new_number():05}"
        self.ids = {self.mark, self.user, self.session, self.conversation}
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
        config = {**self.config, **self.own_config()}
        body = {"user_id": self.user, "agent_id": self.agent, "config": config}
        reply = await self.call("POST", f"{API}/sessions", json=body)
        assert reply.status_code in (200, 201), reply.text
        return reply

    def own_config(self) -> dict[str, Any]:
        return {}

    async def execute(self, code: str) -> str:
        body = {"conversation_id": self.conversation, "code": code}
        headers = {"idempotency-key": f"key-{new_mark()}"}
        reply = await self.call("POST", f"{self.url}/execute", json=body, headers=headers)
        if reply.status_code == 200:
            return f"200 {reply.json()['status']}"
        return error_of(reply)

    def stream(self, url: str, body: dict[str, Any]) -> Stream:
        """Start a streamed request, which is closed with the cell at the latest."""
        stream = Stream(self.place.http, url, body)
        self.held.push_async_callback(stream.close)
        return stream

    # -- the acts ------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make everything around the thing."""
        await self.ensure()
        await self.learn_ids()

    async def learn_ids(self) -> None:
        """Add the id of the sandbox: the audit log names it, or the id of the session."""
        reply = await self.call("GET", f"/v1/sandboxes/{self.session}")
        self.ids |= {self.session, str(reply.json()["id"])}

    async def ready(self) -> None:
        """Create and use it."""
        await self.create()
        await self.use()

    async def create(self) -> str:
        raise NotImplementedError

    async def use(self) -> str:
        raise NotImplementedError

    async def look(self) -> str:
        """Ask for the thing; this starts nothing and changes nothing."""
        raise NotImplementedError

    async def delete(self) -> str:
        raise NotImplementedError

    async def before(self, act: str) -> None:
        """Do what precedes the act."""
        if act == "delete while it runs":
            await self.begin()

    async def begin(self) -> None:
        """Let code run that is in the way of a deletion."""
        body = {"conversation_id": self.conversation, "code": _LONG}
        self.running = self.stream(f"{self.url}/execute", body)
        await self.running.until(STARTED)

    async def end(self) -> str:
        """Return how the code that `begin` started has ended."""
        assert self.running is not None
        if not self.ends_code:
            body = {"conversation_id": self.conversation}
            await self.call("POST", f"{self.url}/interrupt", json=body)
        last = await self.running.end()
        last = last.get("run", last)
        error = last.get("error") or {}
        return f"{last.get('status')} {error.get('name', '')}".strip()

    async def moved(self) -> None:
        """Connect to the service after its restart."""

    async def before_restart(self) -> None:
        """Begin what is in progress when the service is killed or copied."""

    async def idle(self) -> None:
        await self.place.later(IDLE_S + 1)

    async def expire(self) -> None:
        await self.place.later(TTL_S + 1)

    async def purge(self) -> None:
        await self.place.later(GRACE_S + 1, collect=True)

    async def expire_session(self) -> None:
        await self.expire()

    async def restore(self) -> str:
        reply = await self.ensure()
        restored = "restored" if reply.json()["info"]["restored"] else "empty"
        return f"{reply.status_code} {restored}"

    async def stop(self) -> str:
        return await self.ask("POST", f"{self.url}/stop")

    async def extend(self) -> str:
        return await self.ask("POST", f"{self.url}/extend_ttl", json={"extend_by": 3600})


class SessionThing(Thing):
    def own_config(self) -> dict[str, Any]:
        return {"env": {"WORD": self.mark}}

    async def prepare(self) -> None:
        """It is the session."""

    async def create(self) -> str:
        answer = error_of(await self.ensure())
        await self.learn_ids()
        return answer

    async def use(self) -> str:
        return await self.execute(f"open('{self.mark}', 'w').write('{self.mark}')")

    async def look(self) -> str:
        """Wait for the first kernels of the policy: `pending` says that they start."""
        while True:
            reply = await self.call("GET", self.url)
            if reply.status_code != 200 or reply.json()["status"] != "pending":
                break
            await asyncio.sleep(0.02)
        return f"200 {reply.json()['status']}" if reply.status_code == 200 else error_of(reply)

    async def delete(self) -> str:
        return await self.ask("DELETE", self.url)


class ConversationThing(Thing):
    async def create(self) -> str:
        return await self.execute(f"open('{self.mark}', 'w').write('{self.mark}')")

    async def use(self) -> str:
        return await self.execute(f"print('{self.mark}')")

    async def look(self) -> str:
        """Look into the list of the session, which has the conversation even after its expiry."""
        reply = await self.call("GET", self.url)
        if reply.status_code != 200:
            return error_of(reply)
        there = self.conversation in reply.json()["info"]["conversations"]
        return "200 listed" if there else "200 not listed"

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
