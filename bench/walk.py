"""python -m bench.walk: count the modules and calls of sbx that one warm cell over HTTP takes, or
with `--upload` one small upload.

The service runs in this process, and a plain HTTP client in a thread. `--calls` prints each call.
"""

import asyncio
import http.client
import inspect
import json
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import uvicorn
import uvloop

import sbx
from sbx.api.app import create_app
from sbx.api.server.http_protocol import HttpProtocol
from sbx.api.server.settings import ServiceSettings
from sbx.service.service import Service

_SBX = str(Path(sbx.__file__).parent) + "/"
_WARM_UP = 20
_ROUNDS = 20
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Counter:
    """Counts the calls of functions in `sbx/`, in every thread that starts after it."""

    def __init__(self) -> None:
        self.counting = False
        self.calls: list[tuple[str, str]] = []
        self._suspended: set[FrameType] = set()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.counting or event != "call" or frame in self._suspended:
            return
        code = frame.f_code
        if code.co_filename.startswith(_SBX):
            self.calls.append((code.co_filename.removeprefix(_SBX), code.co_qualname))
            if code.co_flags & _GENERATOR:
                self._suspended.add(frame)  # there is another event each time that it continues


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("sbx")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))

    def post(self, path: str, body: Any) -> Any:
        content = json.dumps(body)
        self.request("POST", path, content, {"content-type": "application/json"})
        return json.loads(self.getresponse().read())

    def put(self, path: str, content: bytes) -> Any:
        self.request("PUT", path, content, {"content-type": "application/octet-stream"})
        return json.loads(self.getresponse().read())


def _drive(path: Path, counter: _Counter, *, upload: bool) -> list[list[tuple[str, str]]]:
    client = _Connection(path)
    sandbox = client.post("/v1/sandboxes", {})
    conversation = f"/v1/sandboxes/{sandbox['id']}/conversations/default"
    walks = []
    for round in range(_WARM_UP + _ROUNDS):
        counter.calls = []
        counter.counting = round >= _WARM_UP
        if upload:
            reply = client.put(f"{conversation}/uploads/file-{round}.csv", b"a,b\n1,2\n")
        else:
            reply = client.post(f"{conversation}/runs", {"code": "1+1"})
        threading.Event().wait(0.05)  # the row is written after the reply
        counter.counting = False
        assert reply["size"] == 8 if upload else reply["result"] == "2", reply
        walks.append(counter.calls)
    client.close()
    return walks[_WARM_UP:]


async def _serve(drive: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="sbx-walk-") as directory:
        settings = ServiceSettings(
            data_dir=Path(directory, "data"), socket=Path(directory, "sbx.sock")
        )
        async with Service(settings) as service:
            config = uvicorn.Config(
                create_app(service, settings),
                uds=str(settings.socket),
                http=HttpProtocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.01)
            try:
                return await asyncio.to_thread(drive, settings.socket)
            finally:
                server.should_exit = True
                await serving


def main(
    calls: Annotated[bool, typer.Option(help="Print each call.")] = False,
    upload: Annotated[bool, typer.Option(help="Count an upload instead of a cell.")] = False,
) -> None:
    """Count the modules and calls of the shortest of some walks."""
    counter = _Counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        walks = runner.run(_serve(lambda path: _drive(path, counter, upload=upload)))
    walk = min(walks, key=len)
    if calls:
        for module, function in walk:
            print(f"{module:40} {function}")
    for module, count in Counter(module for module, _ in walk).most_common():
        print(f"{count:4}  {module}")
    print(f"{len({module for module, _ in walk})} modules, {len(walk)} calls")


if __name__ == "__main__":
    typer.run(main)
