"""The things in a conversation, with a route of their own: see matrix_things.py."""

from typing import Any, ClassVar

from matrix_places import PATIENCE_S, TTL_S, error_of
from matrix_things import STARTED, ConversationThing, Thing
from sessions_calls import until

_SERVER = """
import functools, http.server, threading
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


class ContextThing(Thing):
    """Its marker is its name: its variables are in memory only."""

    async def create(self) -> str:
        return await self.ask("POST", f"{self.box}/contexts", json={"name": self.mark})

    async def use(self) -> str:
        body = {"code": "x = 1", "context": self.mark}
        reply = await self.call("POST", f"{self.box}/runs", json=body)
        return f"200 {reply.json()['status']}" if reply.status_code == 200 else error_of(reply)

    async def look(self) -> str:
        reply = await self.call("GET", f"{self.box}/contexts/{self.mark}")
        return f"200 {reply.json()['status']}" if reply.status_code == 200 else error_of(reply)

    async def delete(self) -> str:
        return await self.ask("DELETE", f"{self.box}/contexts/{self.mark}")

    async def begin(self) -> None:
        code = f"import time\nprint({STARTED!r}, flush=True)\ntime.sleep(600)"
        body = {"code": code, "context": self.mark}
        self.running = self.stream(f"{self.box}/runs", body)
        await self.running.until(STARTED)


class FileThing(Thing):
    ends_code = False

    @property
    def _file(self) -> dict[str, Any]:
        return {"url": f"{self.box}/files", "params": {"path": f"{self.mark}.txt"}}

    async def create(self) -> str:
        return await self.ask("PUT", **self._file, content=self.mark.encode())

    async def use(self) -> str:
        return await self.execute(
            "import pathlib\nfor p in pathlib.Path().glob('*.txt'): p.read_text()"
        )

    async def look(self) -> str:
        return await self.ask("GET", **self._file)

    async def delete(self) -> str:
        return await self.ask("DELETE", **self._file)


class RunThing(ConversationThing):
    """The record of a run. It has no deletion of its own, but that of its conversation."""

    run = ""

    async def create(self) -> str:
        body = {"conversation_id": self.conversation, "code": f"print('{self.mark}')"}
        reply = await self.call("POST", f"{self.url}/execute", json=body)
        self.run = reply.json()["run_id"]
        return f"200 {reply.json()['status']}"

    async def use(self) -> str:
        url = f"/v1/sandboxes/{self.session}/history/{self.run}"
        return await self.ask("PATCH", url, json={"notes": self.mark})

    async def look(self) -> str:
        reply = await self.call("GET", f"/v1/sandboxes/{self.session}/history/{self.run}")
        if reply.status_code != 200:
            return error_of(reply)
        return f"200 {'ok' if reply.json()['success'] else reply.json()['error']}"

    async def stop(self) -> str:
        body = {"conversation_id": self.conversation}
        return await self.ask("POST", f"{self.url}/interrupt", json=body)

    async def begin(self) -> None:
        code = f"import time\nprint('{self.mark}', {STARTED!r}, flush=True)\ntime.sleep(600)"
        body = {"conversation_id": self.conversation, "code": code}
        self.running = self.stream(f"{self.url}/execute", body)
        await self.running.until(STARTED)
        self.run = self.running.events[0]["run_id"]

    async def before_restart(self) -> None:
        await self.begin()


class CommandThing(Thing):
    id = ""

    @property
    def _url(self) -> str:
        return f"{self.box}/commands/{self.id}"

    async def create(self) -> str:
        body = {"command": f"echo {self.mark}; read word; echo $word", "stdin_open": True}
        reply = await self.call("POST", f"{self.box}/commands", json=body)
        self.id = reply.json()["id"]
        await self._printed()
        return error_of(reply)

    async def _printed(self) -> None:
        async def printed() -> bool:
            reply = await self.call("GET", f"{self.box}/commands/{self.id}/logs")
            return self.mark in reply.json()["text"]

        await until(printed, PATIENCE_S)

    async def use(self) -> str:
        return await self.ask("GET", f"{self._url}/logs")

    async def look(self) -> str:
        reply = await self.call("GET", self._url)
        if reply.status_code != 200:
            return error_of(reply)
        body = reply.json()
        return f"200 {body['state']} {body['cause'] or ''}".strip()

    async def stop(self) -> str:
        return await self.ask("POST", f"{self._url}/stop", json={"grace_s": 0})

    async def delete(self) -> str:
        """Delete its conversation: a command has no deletion of its own."""
        return await self.ask("DELETE", f"{self.url}/conversations/{self.conversation}")

    async def begin(self) -> None:
        """It runs already."""

    async def end(self) -> str:
        return "with it"


class TerminalThing(Thing):
    id = ""

    @property
    def _url(self) -> str:
        return f"{self.box}/terminals/{self.id}"

    async def create(self) -> str:
        body = {"command": f"echo {self.mark}; read word"}
        reply = await self.call("POST", f"{self.box}/terminals", json=body)
        self.id = reply.json()["id"]
        await self._drawn()
        return error_of(reply)

    async def _drawn(self) -> None:
        async def drawn() -> bool:
            reply = await self.call("GET", f"{self._url}/screen")
            return any(self.mark in line for line in reply.json()["lines"])

        await until(drawn, PATIENCE_S)

    async def use(self) -> str:
        return await self.ask("POST", f"{self._url}/resize", json={"rows": 30, "columns": 90})

    async def look(self) -> str:
        reply = await self.call("GET", self._url)
        if reply.status_code != 200:
            return error_of(reply)
        return "200 running" if reply.json()["running"] else "200 ended"

    async def delete(self) -> str:
        return await self.ask("DELETE", self._url)

    async def begin(self) -> None:
        """It runs already."""

    async def end(self) -> str:
        return "with it"


class TokenThing(Thing):
    """Its marker is its text, which is stored nowhere."""

    ends_code = False
    id = ""

    async def create(self) -> str:
        body = {"user_id": self.user, "agent_id": self.agent, "ttl_s": 2 * TTL_S}
        reply = await self.call("POST", "/v1/admin/tokens", json=body)
        self.id, text = reply.json()["id"], reply.json()["token"]
        self.ids.add(self.id)
        self.mark = text.rpartition(".")[2]
        self._headers = {"authorization": f"Bearer {text}"}
        return error_of(reply)

    async def use(self) -> str:
        url = f"{self.url}/files"
        return await self.ask(
            "POST",
            f"{url}/upload",
            headers=self._headers,
            data={"conversation_id": self.conversation},
            files={"file": ("word.txt", b"word")},
        )

    async def look(self) -> str:
        return await self.ask("GET", self.url, headers=self._headers)

    async def delete(self) -> str:
        return await self.ask("DELETE", f"/v1/admin/tokens/{self.id}")

    async def expire(self) -> None:
        await self.place.later(2 * TTL_S + 1)

    async def expire_session(self) -> None:
        await super().expire()


class LinkThing(Thing):
    """Its marker is its text, which is stored nowhere. It ends with its session."""

    path = ""

    async def prepare(self) -> None:
        await super().prepare()
        self.conversation = "default"
        assert await self.execute(_SERVER) == "200 ok"

    async def create(self) -> str:
        url = f"/v1/sandboxes/{self.session}/port-links"
        reply = await self.call("POST", url, json={"port": 8000, "ttl": int(2 * TTL_S)})
        self.path = reply.json()["path"]
        self.mark = self.path.rpartition("=")[2]
        return error_of(reply)

    async def use(self) -> str:
        answer = await self.look()
        await self.place.at_rest()
        return answer

    async def look(self) -> str:
        async with self.place.browser() as browser:
            return error_of(await browser.get(self.path))

    async def delete(self) -> str:
        return await self.ask("DELETE", self.url)


class GrantThing(Thing):
    config: ClassVar[dict[str, Any]] = {"policy": "granting"}
    id = ""

    async def create(self) -> str:
        target = f"{self.mark}.example.org:443"
        body = {"kind": "network", "target": target, "duration": "conversation"}
        begin = len(await self.place.log())
        reply = await self.call("POST", f"{self.box}/grants", json=body)
        self.id = reply.json()["id"]
        await self.place.events(begin, {self.mark}, "grant.added")
        return error_of(reply)

    async def use(self) -> str:
        return await self.execute("x = 1")

    async def look(self) -> str:
        reply = await self.call("GET", f"{self.box}/grants")
        if reply.status_code != 200:
            return error_of(reply)
        ids = [each["id"] for each in reply.json()["items"]]
        return "200 valid" if self.id in ids else "200 ended"

    async def delete(self) -> str:
        return await self.ask("DELETE", f"{self.box}/grants/{self.id}")

    ends_code = False
