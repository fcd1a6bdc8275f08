"""A kernel as a notebook client has it, by jupyter_client's blocking classes, whoever it is.

The heartbeat channel, a thread of its own, is left out, as in `baseline`.
"""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from bench.samples import NotMeasured

_REPLY_S = 60.0


class Notebook:
    """A live kernel and a client on its channels; `NotebookKernel.started` makes one."""

    def __init__(self, manager: KernelManager) -> None:
        self._name = manager.kernel_name
        self._client = manager.client()
        self._client.start_channels(hb=False)

    def ready(self) -> None:
        """Return when jupyter_client says so: nothing has come for 0.2 s."""
        self._client.wait_for_ready(timeout=_REPLY_S)

    def reply(self, code: str) -> str:
        """Execute a cell until its reply is here; the id of the request. Raises NotMeasured when
        the cell failed."""
        reply = self._client.execute(code, reply=True, timeout=_REPLY_S)
        if reply["content"]["status"] != "ok":
            raise NotMeasured(f"{code!r} in {self._name} gave {reply['content']}")
        request: str = reply["parent_header"]["msg_id"]
        return request

    def cell_ms(self) -> float:
        """Milliseconds of 1+1, until its reply and its idle status are here."""
        began = time.perf_counter()
        shown = self._shown_by(self.reply("1+1"))
        ended = time.perf_counter()
        if shown != ["2"]:
            raise NotMeasured(f"1+1 in {self._name} gave {shown}")
        return (ended - began) * 1000

    def _shown_by(self, request: str) -> list[str]:
        """The results of a cell, as text, when the kernel is idle again."""
        shown: list[str] = []
        while True:
            message = self._client.get_iopub_msg(timeout=_REPLY_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            content: dict[str, Any] = message["content"]
            if message["msg_type"] == "execute_result":
                shown.append(content["data"]["text/plain"])
            if content.get("execution_state") == "idle":
                return shown

    def close(self) -> None:
        self._client.stop_channels()


@dataclass(frozen=True, slots=True)
class NotebookKernel:
    """What a client starts: the kernelspec of this name, for a notebook in this directory."""

    name: str
    specs: KernelSpecManager
    directory: Path

    @contextmanager
    def started(self) -> Iterator[Notebook]:
        """A new kernel and a client of it; both are gone afterwards."""
        manager = KernelManager(kernel_name=self.name, kernel_spec_manager=self.specs)
        try:
            manager.start_kernel(
                cwd=str(self.directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            notebook = Notebook(manager)
            try:
                yield notebook
            finally:
                notebook.close()
        finally:
            manager.shutdown_kernel(now=True)

    def start_ms(self, code: str, ready: bool = False) -> float:
        """Milliseconds from nothing to the reply to a first cell; with `ready`, which the client
        sends only when it has waited for the kernel to be ready."""
        began = time.perf_counter()
        with self.started() as notebook:
            if ready:
                notebook.ready()
            notebook.reply(code)
            return (time.perf_counter() - began) * 1000


@asynccontextmanager
async def client_thread() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Awaits a function in one thread, always the same: jupyter_client keeps a loop for each that
    calls it, and would use another thread from one whose loop runs."""
    with ThreadPoolExecutor(1, thread_name_prefix="bench-client") as thread:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
        try:
            yield in_thread
        finally:
            await in_thread(_close_loop)


def _close_loop() -> None:
    ensure_event_loop().close()
