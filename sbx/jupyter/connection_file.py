"""The connection file: where a kernel is to be reached, and by which key, as JSON.

Whoever starts `python -m sbx.jupyter` has written it; what is missing is filled in, as other
kernels do it: ports that linux chooses, and a key.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from jupyter_client.connect import write_connection_file

from sbx.errors import BadRequest, NotFound
from sbx.jupyter.connection import Connection

_LARGEST = 64 * 1024
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Curve = Annotated[str, msgspec.Meta(pattern="^[!-~]{40}$")]  # 32 bytes as Z85


class _Said(msgspec.Struct):
    """What is looked at; other keys are other programs'."""

    transport: Literal["tcp", "ipc"] = "tcp"
    ip: str = "127.0.0.1"
    key: str = ""
    signature_scheme: str = "hmac-sha256"
    shell_port: _Port = 0
    iopub_port: _Port = 0
    stdin_port: _Port = 0
    control_port: _Port = 0
    hb_port: _Port = 0
    curve_publickey: _Curve | None = None
    curve_secretkey: _Curve | None = None


def read(path: Path) -> Connection:
    """What the file asks for; a file that is not there asks for nothing.

    A key is made where none stands. Raises NotFound `connection_file_unreadable`, BadRequest
    `invalid_connection_file`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        data = b"{}"
    except OSError as error:
        raise NotFound(
            f"the connection file {path} cannot be read: {error.strerror}",
            code="connection_file_unreadable",
            hint="name the file that the client wrote, or one that does not exist yet",
        ) from None
    try:
        said = msgspec.json.decode(data[:_LARGEST], type=_Said)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(
            f"{path} is no connection file: {error}",
            code="invalid_connection_file",
            hint="it is a JSON object with ip, key and ports; without the file one is written",
        ) from None
    values = msgspec.structs.asdict(said)
    values["key"] = (said.key or secrets.token_hex(32)).encode()
    for name in ("curve_publickey", "curve_secretkey"):
        values[name] = values[name] and values[name].encode()
    return Connection(**values)


@contextmanager
def telling(path: Path, bound: Connection) -> Iterator[None]:
    """Meanwhile the file says where the kernel is reached; afterwards it is gone where it was not
    there before. Raises NotFound `connection_file_unreadable`."""
    was_there = path.exists()
    if not was_there or read(path) != bound:
        _write(path, bound)
    try:
        yield
    finally:
        if not was_there:
            path.unlink(missing_ok=True)


def _write(path: Path, bound: Connection) -> None:
    """Write it whole, for its owner only: a client may read the file at any moment."""
    values = {name: value for name, value in asdict(bound).items() if value is not None}
    target = path.resolve()  # a link stays
    staged = target.with_name(f".{secrets.token_hex(8)}.json")
    try:
        try:
            write_connection_file(str(staged), **values)
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise NotFound(
            f"the connection file {path} cannot be written: {error.strerror}",
            code="connection_file_unreadable",
            hint="name a file in a directory of your own",
        ) from None
