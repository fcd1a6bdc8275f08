"""The classes of E2B's SDK for one kind of client, with the address and the key of an owner."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pyqwest
from both_sdks import Both
from e2b import PtySize
from e2b_code_interpreter import AsyncSandbox, Sandbox
from sdk_service import SdkService

# The transport of the SDK has a runtime with descriptors, for the life of the process. It starts
# here, before any test counts descriptors.
with contextlib.suppress(OSError):
    pyqwest.SyncClient().get("http://127.0.0.1:9/")
SIZE = PtySize(rows=30, cols=100)


def e2b_key(key: str) -> str:
    return f"e2b_{key.removeprefix('sk-sbx-')}"


class Face:
    """`kind` is async or sync."""

    def __init__(self, kind: str, sdk: SdkService, key: str) -> None:
        self.is_async = kind == "async"
        self.options = {"api_key": e2b_key(key), "api_url": sdk.url, "sandbox_url": sdk.url}
        self.sandboxes = Both(AsyncSandbox if self.is_async else Sandbox)

    async def create(self, template: str | None = None, **options: Any) -> Both:
        return Both(await self.sandboxes.create(template, **{**self.options, **options}))

    async def connect(self, sandbox_id: str, **options: Any) -> Both:
        return Both(await self.sandboxes.connect(sandbox_id, **{**self.options, **options}))

    async def pages(self, **options: Any) -> list[list[str]]:
        """The ids of all pages of a list."""
        paginator = self.sandboxes.inner.list(**self.options, **options)
        pages = []
        while paginator.has_next:
            pages.append([each.sandbox_id for each in await Both(paginator).next_items()])
        return pages

    async def terminal(self, box: Both, log: list[bytes], **options: Any) -> Both:
        """A terminal, and its output in the log once it is awaited."""
        if self.is_async:
            options["on_data"] = log.append
        return Both(await box.pty.create(SIZE, **options))

    async def ended(self, terminal: Both, log: list[bytes]) -> Any:
        return await (terminal.wait() if self.is_async else terminal.wait(on_pty=log.append))

    async def watched(self, box: Both, path: str, log: list[Any], **options: Any) -> Both:
        """A watch; call `events` for what the log has."""
        if self.is_async:
            options["on_event"] = log.append
        return Both(await box.files.watch_dir(path, **options))

    async def events(self, handle: Both, log: list[Any]) -> list[Any]:
        if not self.is_async:
            log += await handle.get_new_events()
        return log

    async def stream(self, pieces: Any) -> list[bytes]:
        if self.is_async:
            return [bytes(piece) async for piece in pieces]
        return await asyncio.to_thread(lambda: [bytes(piece) for piece in pieces])

    async def stream_input(self, box: Both, pid: int, pieces: Sequence[Any]) -> None:
        if not self.is_async:
            await box.commands.stream_input(pid, pieces)
            return
        handle = box.commands.inner.stream_input(pid)
        for piece in pieces:
            await handle.send(piece)
        await handle.close()


def collector(log: list[Any]) -> Callable[[Any], None]:
    """A callback that adds what it gets, as text, to the log."""
    return lambda each: log.append(str(each))
