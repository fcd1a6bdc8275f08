"""The first orders to a broker, sent before the modules that compute them are imported.

    process ──spawn──► broker ◄── the orders of the process before: hello, start_zygote
       │                 │
       imports           probes the host, starts the zygote
       │                 │
       computes the same orders, and takes the replies

The imports of a process take 110 ms, and a broker and a zygote start in 180. The first two orders
are usually those of the process before. So a runtime keeps them in a file, and the next process
sends them at once. Then it computes its own orders and compares them as whole values. For an equal
order it takes the reply; otherwise it ends the early zygote, or the early broker, and sends its
own. A file that is out of date costs time, and changes nothing else.

An order names programs of this host, as the settings do. So the file is in the data directory of
the user, which no sandbox may see, and a file that another user can write is not read.
"""

import json
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from sbx.linux.new_files import new_file_beside

HELLO, ZYGOTE = 1, 2  # the numbers of the orders
_NAME = "early_orders.json"
_LABELS = 8
_SIZE_MAX = 1 << 20


@dataclass(slots=True)
class EarlyOrders:
    """`label` names the first sandbox: its policy, and its workspace if that is a directory of the
    host. `hello` and `zygote` are the orders that were sent."""

    label: str
    hello: Mapping[str, Any] | None = None
    zygote: Mapping[str, Any] | None = None

    def keep(self, hello: Mapping[str, Any], zygote: Mapping[str, Any] | None) -> None:
        """Write the orders for the next process, if others were sent. None: no zygote started.

        Without a directory or with a full disk, the next process sends none.
        """
        hello = _plain(_without_process(hello))
        zygote = _plain(zygote) if zygote is not None else None
        if hello == self.hello and zygote == self.zygote:
            return
        with suppress(OSError, RuntimeError):
            path = _path()
            _, zygotes = _read(path)
            zygotes.pop(self.label, None)
            if zygote is not None:
                zygotes[self.label] = zygote
            latest = dict(list(zygotes.items())[-_LABELS:])
            _write(path, json.dumps({"hello": hello, "zygotes": latest}))

    @property
    def zygote_name(self) -> str | None:
        return self.zygote["zygote"] if self.zygote is not None else None

    def matches_hello(self, hello: Mapping[str, Any]) -> bool:
        """Whether the `hello` that was sent is equal, or none was sent."""
        return self.hello is None or self.hello == _plain(_without_process(hello))

    def matches_zygote(self, zygote: Mapping[str, Any]) -> bool:
        """Whether the early zygote is the one of this order."""
        return self.zygote == _plain(zygote)


def send(sock: socket.socket, label: str) -> EarlyOrders:
    """Send the orders that were kept for this label, if any."""
    early = EarlyOrders(label)
    with suppress(OSError, RuntimeError):  # neither HOME nor an account, or a full socket
        hello, zygotes = _read(_path())
        if hello:
            _send(sock, HELLO, "hello", {**hello, **of_process()})
            early.hello = hello
            if (zygote := zygotes.get(label)) is not None:
                _send(sock, ZYGOTE, "start_zygote", zygote)
                early.zygote = zygote
    return early


def of_process() -> dict[str, Any]:
    """Return the part of `hello` that is different in each process."""
    return {"runtime": os.getpid(), "id": secrets.token_hex(4)}


def _without_process(hello: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hello.items() if key not in ("runtime", "id")}


def _send(sock: socket.socket, number: int, do: str, words: Mapping[str, Any]) -> None:
    sock.send(json.dumps({"seq": number, "do": do, **words}).encode())


def _plain(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words as the file has them: tuples are lists there."""
    plain: dict[str, Any] = json.loads(json.dumps(words))
    return plain


def _path() -> Path:
    return user_data_path("sbx") / _NAME


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return hello, and the zygotes by label. Both are empty if the file does not exist, if it is
    not the file of this user alone, or if its content is of another form."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}, {}
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or others:
            return {}, {}
        text = file.read(_SIZE_MAX)
    try:
        content = json.loads(text)
        hello, zygotes = dict(content["hello"]), dict(content["zygotes"])
        by_label = {str(label): dict(zygote) for label, zygote in zygotes.items()}
        is_named = all(isinstance(zygote["zygote"], str) for zygote in by_label.values())
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}, {}
    return (hello, by_label) if is_named else ({}, {})


def _write(path: Path, text: str) -> None:
    """Replace the file, so that a reader finds the old or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with new_file_beside(path, 0o600) as (fresh, file):
        file.write(text.encode())
        file.flush()
        fresh.replace(path)
