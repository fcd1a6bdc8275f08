"""Sandboxes of our client, of Bay's routes and of other products' SDKs: see matrix_things.py."""

import asyncio
import time
from collections.abc import Awaitable
from datetime import timedelta
from typing import Any

from both_sdks import Both
from e2b_face import Face as E2bFace
from matrix_places import PATIENCE_S, TTL_S, error_of, new_mark
from matrix_things import STARTED, Thing
from opensandbox.models.filesystem import WriteEntry
from sdk_service import SdkService
from sessions_calls import until
from test_opensandbox import Face as OpenSandboxFace

from sbx.client import Client
from sbx.errors import SbxError
from sbx.protocol.runs import RunEnd

_LONG = f"import time\nprint({STARTED!r}, flush=True)\ntime.sleep(600)"


async def outcome(call: Awaitable[Any]) -> str:
    """Return "ok", the error of the code that ran, or the error of an SDK."""
    try:
        result = await call
    except Exception as error:  # noqa: BLE001  # each SDK has a tree of its own
        return type(error).__name__
    failure = getattr(result, "error", None)
    return "ok" if failure is None else str(failure.name)


class ClientThing(Thing):
    """A sandbox of `sbx.client`."""

    async def prepare(self) -> None:
        self.client = await self.held.enter_async_context(Client(self.place.socket))

    async def moved(self) -> None:
        await self.prepare()

    async def create(self) -> str:
        info = await self.client.create(ttl_s=TTL_S, env={"WORD": self.mark})
        self.session = info.id
        self.ids.add(info.id)
        return "ok"

    async def use(self) -> str:
        code = f"open('{self.mark}', 'w').write('{self.mark}'); print('{self.mark}')"
        run = await self.client.sandbox(self.session).run(code)
        return run.status.value

    async def look(self) -> str:
        try:
            return str((await self.client.get(self.session)).status)
        except SbxError as error:
            return f"{type(error).__name__} {error.code}"

    async def delete(self) -> str:
        return await outcome(self.client.delete(self.session))

    async def restore(self) -> str:
        return await outcome(self.client.resume(self.session))

    async def stop(self) -> str:
        return await outcome(self.client.stop(self.session))

    async def extend(self) -> str:
        return await outcome(self.client.extend(self.session, 3600))

    async def begin(self) -> None:
        started = asyncio.Event()

        async def run() -> str:
            box = self.client.sandbox(self.session)
            async for event in box.stream(_LONG):
                if STARTED in str(event):
                    started.set()
                if isinstance(event, RunEnd):
                    return event.run.status.value
            raise AssertionError("a run without an end")

        self.task = asyncio.create_task(run())
        await asyncio.wait_for(started.wait(), PATIENCE_S)

    async def end(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


class BayThing(Thing):
    """A sandbox of Bay's routes."""

    @property
    def url(self) -> str:
        return f"/v1/sandboxes/{self.session}"

    def own_config(self) -> dict[str, Any]:
        return {"env": {"WORD": self.mark}}

    async def prepare(self) -> None:
        """It has no session."""

    async def create(self) -> str:
        body: dict[str, Any] = {"ttl": int(TTL_S), **self.own_config()}
        headers = {"idempotency-key": f"key-{new_mark()}"}
        reply = await self.call("POST", "/v1/sandboxes", json=body, headers=headers)
        self.session = reply.json()["id"]
        self.ids.add(self.session)
        return error_of(reply)

    async def use(self) -> str:
        code = f"open('{self.mark}', 'w').write('{self.mark}'); print('{self.mark}')"
        headers = {"idempotency-key": f"key-{new_mark()}"}
        url = f"{self.url}/python/exec"
        reply = await self.call("POST", url, json={"code": code}, headers=headers)
        if reply.status_code == 200:
            return "200 ok" if reply.json()["success"] else "200 error"
        return error_of(reply)

    async def look(self) -> str:
        reply = await self.call("GET", self.url)
        return f"200 {reply.json()['status']}" if reply.status_code == 200 else error_of(reply)

    async def delete(self) -> str:
        return await self.ask("DELETE", self.url)

    async def restore(self) -> str:
        return await self.ask("POST", f"{self.url}/resume")

    async def begin(self) -> None:
        self.running = self.stream(f"{self.url}/python/exec", {"code": _LONG})
        await self.running.until(STARTED)

    async def end(self) -> str:
        assert self.running is not None
        last = await self.running.end()
        return str(last.get("run", last).get("status"))


class WorkspaceThing(BayThing):
    """A cargo that was created separately, and a sandbox that uses it."""

    cargo = ""

    def own_config(self) -> dict[str, Any]:
        return {"cargo_id": self.cargo}

    async def create(self) -> str:
        reply = await self.call("POST", "/v1/cargos", json={})
        self.cargo = reply.json()["id"]
        self.ids.add(self.cargo)
        return error_of(reply)

    async def use(self) -> str:
        """Let a sandbox write a file to it."""
        await BayThing.create(self)
        url = f"/v1/sandboxes/{self.session}/conversations/default/files"
        return await self.ask("PUT", url, params={"path": self.mark}, content=self.mark.encode())

    async def look(self) -> str:
        return await self.ask("GET", f"/v1/cargos/{self.cargo}")

    async def before(self, act: str) -> None:
        if act == "delete":
            await BayThing.delete(self)
        await super().before(act)

    async def delete(self) -> str:
        return await self.ask("DELETE", f"/v1/cargos/{self.cargo}")


class E2bThing(Thing):
    remote: Both

    async def prepare(self) -> None:
        sdk = SdkService(None, self.place.url.removeprefix("http://"))  # type: ignore[arg-type]
        self.face = E2bFace("async", sdk, self.place.sdk_key)

    async def moved(self) -> None:
        await self.prepare()
        self.remote = await self.face.connect(self.remote.sandbox_id)

    async def create(self) -> str:
        self.remote = await self.face.create(
            timeout=int(TTL_S), metadata={"word": self.mark}, envs={"WORD": self.mark}
        )
        self.ids.add(self.remote.sandbox_id.removeprefix("sandbox"))
        return "ok"

    async def use(self) -> str:
        await self.remote.files.write(self.mark, self.mark)
        return await outcome(self.remote.run_code(f"print('{self.mark}')"))

    async def look(self) -> str:
        try:
            return str((await self.remote.get_info()).state.value)
        except Exception as error:  # noqa: BLE001  # the SDK has a tree of its own
            return type(error).__name__

    async def delete(self) -> str:
        return await outcome(self.remote.kill())

    async def restore(self) -> str:
        return await outcome(self.face.connect(self.remote.sandbox_id))

    async def stop(self) -> str:
        return await outcome(self.remote.pause())

    async def extend(self) -> str:
        return await outcome(self.remote.set_timeout(2 * int(TTL_S)))

    async def begin(self) -> None:
        started = asyncio.Event()
        run = self.remote.run_code(_LONG, on_stdout=lambda _: started.set(), timeout=600)
        self.task = asyncio.create_task(outcome(run))
        await asyncio.wait_for(started.wait(), PATIENCE_S)

    async def end(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


class OpenSandboxThing(Thing):
    remote: Both

    async def prepare(self) -> None:
        host = self.place.url.removeprefix("http://")
        self.face = OpenSandboxFace("async", host, self.place.sdk_key)
        self.held.push_async_callback(self.face.close)

    async def moved(self) -> None:
        await self.prepare()
        self.remote = await self.face.connect(self.remote.id)

    async def create(self) -> str:
        self.remote = await self.face.create(
            timeout=timedelta(seconds=TTL_S),
            metadata={"word": self.mark},
            env={"WORD": self.mark},
        )
        self.ids.add(self.remote.id)
        return "ok"

    async def use(self) -> str:
        entry = WriteEntry(path=f"/workspace/{self.mark}", data=self.mark)
        await self.remote.files.write_files([entry])
        return await outcome(self.remote.commands.run(f"echo {self.mark}"))

    async def look(self) -> str:
        try:
            return str((await self.remote.get_info()).status.state)
        except Exception as error:  # noqa: BLE001  # the SDK has a tree of its own
            return type(error).__name__

    async def delete(self) -> str:
        return await outcome(self.remote.kill())

    async def restore(self) -> str:
        return await outcome(self.face.resume(self.remote.id))

    async def stop(self) -> str:
        return await outcome(self.remote.pause())

    async def extend(self) -> str:
        """The SDK counts from the time of this machine, and the service has another clock."""
        ahead = 0.0 if self.place.clock is None else self.place.clock.now() - time.time()
        return await outcome(self.remote.renew(timedelta(seconds=ahead + 2 * TTL_S)))

    async def begin(self) -> None:
        log: list[Any] = []
        run = self.remote.commands.run(
            f"echo {STARTED}; sleep 600", handlers=self.face.handlers(log)
        )
        self.task = asyncio.create_task(outcome(run))

        async def printed() -> bool:
            return any("stdout" in name for name, _ in log)

        await until(printed, PATIENCE_S)

    async def end(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task
