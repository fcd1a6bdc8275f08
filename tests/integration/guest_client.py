"""A blocking client of the guest's kernel, for tests: the real kernel, in a plain process.

The kernel is forked from a process with nothing imported but `sbx.guest.kernel.setup`, as the
supervisor does it, and talks on a socketpair. There are no walls here: these tests are about what
IPython does over frames.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from sbx.guest import frames
from sbx.guest.frames import RawFrame
from sbx.kernels.frames import KERNEL
from sbx.kernels.frames import bundle as host_bundle

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
_MARK = "SBX_TEST_KERNEL"

_START = """
import json, socket, sys
sys.path.insert(0, sys.argv[1])
from sbx.guest.kernel.setup import KernelConfig, serve
serve(socket.socket(fileno=int(sys.argv[2])), KernelConfig(**json.loads(sys.argv[3])))
"""


class Cell:
    """What one execute_request brought: its frames in order, and its reply."""

    def __init__(self, frames_before: list[RawFrame], reply: dict[str, Any]) -> None:
        self.frames = frames_before
        self.reply = reply

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [frame.content for frame in self.frames if frame.type in kinds]

    def text(self, name: str = "stdout") -> str:
        return "".join(c["text"] for c in self.of("stream") if c["name"] == name)

    @property
    def result(self) -> str:
        return str(self.of("execute_result")[0]["data"]["text/plain"])

    @property
    def kinds(self) -> list[str]:
        """Types in order; neighbouring stream frames of one name count as one."""
        kinds: list[str] = []
        for frame in self.frames:
            kind = frame.content["name"] if frame.type == "stream" else frame.type
            if not (kinds and kinds[-1] == kind and frame.type == "stream"):
                kinds.append(kind)
        return kinds


class KernelClient:
    """Starts a kernel in `cwd`; a context manager that leaves no process behind."""

    def __init__(self, cwd: Path, **config: Any) -> None:
        self.sock, theirs = socket.socketpair()
        config = {"cwd": str(cwd), "home": str(cwd), **config}
        environment = {
            "PATH": os.environ["PATH"],
            "IPYTHONDIR": str(cwd / ".ipython"),
            "MPLCONFIGDIR": str(cwd / ".mpl"),
            "LANG": "C.UTF-8",
            _MARK: secrets.token_hex(8),
        }
        self._mark = environment[_MARK]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, ROOT, str(theirs.fileno()), json.dumps(config)],
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.sock.settimeout(PATIENCE_S)
        self._count = 0
        self.ready = self.receive().content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.sock.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise
        finally:
            self._end_what_cells_left()

    def _end_what_cells_left(self) -> None:
        """No jail ends them here: commands in sessions of their own, known by their environment."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get(_MARK) == self._mark:
                    child.kill()

    def send(self, kind: str, content: dict[str, Any], name: str | None = None) -> None:
        self.sock.sendall(frames.encode(kind, content, name))

    def receive(self) -> RawFrame:
        frame = frames.receive(self.sock)
        assert frame is not None, "the kernel hung up"
        self._host_accepts(frame)
        return frame

    def _host_accepts(self, frame: RawFrame) -> None:
        """A frame that the host calls malformed would end the kernel that sent it."""
        checked = KERNEL.decode(frames.encode(frame.type, frame.content, frame.id)[4:])
        bundle = getattr(checked.content, "data", None)
        if isinstance(bundle, dict):
            host_bundle(bundle)

    def request(self, kind: str, **content: Any) -> dict[str, Any]:
        """Send a request and return the content of its reply."""
        return self.start(kind, **content)().reply

    def start(self, kind: str, **content: Any) -> Callable[..., Cell]:
        """Send a request; the callable waits for its reply. `on_frame` sees each frame before."""
        self._count += 1
        name = str(self._count)
        self.send(kind, content, name)

        def finish(on_frame: Callable[[RawFrame], None] = lambda frame: None) -> Cell:
            before = []
            while (frame := self.receive()).id != name:
                before.append(frame)
                on_frame(frame)
            return Cell(before, frame.content)

        return finish

    def run(self, code: str, **content: Any) -> Cell:
        content = {"takes_payload": True, **content}
        return self.start("execute_request", code=code, allow_stdin=False, **content)()

    def wait_for_text(self, text: str) -> None:
        """Read frames until `text` was printed."""
        seen = ""
        while text not in seen:
            frame = self.receive()
            seen += frame.content.get("text", "")

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def hears_nothing_for(self, seconds: float) -> bool:
        return not select.select([self.sock], [], [], seconds)[0]


def in_python(code: str, home: Path) -> str:
    """What a fresh interpreter prints that runs `code` with our guest in reach."""
    environment = {"IPYTHONDIR": str(home / ".ipython"), "HOME": str(home)}
    reach = "import sys; sys.path.insert(0, sys.argv[1])\n"
    command = [sys.executable, "-I", "-c", reach + code, str(ROOT)]
    answer: str = subprocess.check_output(command, env=environment, cwd=home, text=True)
    return answer


def eventually(true: Callable[[], bool], within_s: float = 60) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False
