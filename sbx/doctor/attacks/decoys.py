"""The targets of the attacks: a file, a process and sockets that exist only for them.

So an attack that escapes reads, signals or reaches only a decoy. The decoys are removed at the end
of the block.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from sbx.isolation.launch_plan import TEMPAREA, WORKSPACE

UPLOAD = "bait.txt"
MOUNTED = "/mnt/attack-bait"
_VARIABLE = "BAIT_OF_THE_ATTACKS"
_SLEEP = "import time; print(flush=True); time.sleep(600)"
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


class Decoys(Struct, frozen=True):
    """The decoys of one run.

    `token` is a word that only the decoys contain. The attacks receive `parameters`. `shown` is a
    directory with sockets and a FIFO of the host, which is mounted read-only into the sandbox.
    """

    token: str
    file: Path
    shown: Path
    parameters: dict[str, Any]

    def lay_again(self) -> None:
        """Restore the file and its directory."""
        shutil.rmtree(self.file.parent, ignore_errors=True)
        _lay(self.file, self.token)


@contextmanager
def laid_out() -> Iterator[Decoys]:
    """Create the decoys. Start the attacked runtime in the block, so that it has the variable."""
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sbx-baits-")))
        directory.chmod(0o755)  # only the walls keep an attack out
        file = directory / "bait/bait"
        _lay(file, token)
        stack.enter_context(_variable(token))
        stack.enter_context(_listening(socket.AF_UNIX, str(directory / "socket")))
        (directory / "socket").chmod(0o666)
        stack.enter_context(_listening(socket.AF_UNIX, f"\0{token}"))
        shown = directory / "shown"
        _show(shown, stack)
        service = stack.enter_context(_listening(socket.AF_INET, ("127.0.0.1", 0)))
        process = stack.enter_context(_process())
        parameters = {
            "token": token,
            "work": WORKSPACE,
            "file": str(file),
            "upload": f"{TEMPAREA}/{UPLOAD}",
            "packages": sysconfig.get_path("purelib"),
            "pid": process.pid,
            "port": service.getsockname()[1],
            "abstract": token,
            "socket": str(directory / "socket"),
            "shown": MOUNTED,
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},
        }
        yield Decoys(token, file, shown, parameters)


def _lay(file: Path, token: str) -> None:
    file.parent.mkdir()
    file.parent.chmod(0o755)  # independent of the umask
    file.write_text(f"secret {token}\n")
    file.chmod(0o644)


def _show(directory: Path, stack: ExitStack) -> None:
    """Create sockets and a FIFO whose modes allow every user."""
    (directory / "below").mkdir(parents=True)
    stack.enter_context(_listening(socket.AF_UNIX, str(directory / "below/stream")))
    datagram = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    datagram.bind(str(directory / "datagram"))
    os.mkfifo(directory / "pipe")
    reader = os.open(directory / "pipe", os.O_RDWR | os.O_NONBLOCK)
    stack.callback(os.close, reader)
    (directory / "link").symlink_to("below/stream")
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o666)


@contextmanager
def _variable(token: str) -> Iterator[None]:
    os.environ[_VARIABLE] = token
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


@contextmanager
def _listening(family: int, address: Any) -> Iterator[socket.socket]:
    """Listen, but never accept: Linux itself completes the connections of the backlog."""
    with socket.socket(family) as sock:
        sock.bind(address)
        sock.listen(512)
        yield sock


@contextmanager
def _process() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process. It prints a line when it has executed its program."""
    words = [sys.executable, "-I", "-S", "-c", _SLEEP]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd="/"
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()
