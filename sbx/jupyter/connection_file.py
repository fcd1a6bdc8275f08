"""The connection file: the address and the key of a kernel, as JSON.

The program that starts `python -m sbx.jupyter` has written the file. Missing values are filled in,
as in other kernels: Linux chooses the ports, and a key is made.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from jupyter_client.connect import write_connection_file
from msgspec.structs import asdict

from sbx.errors import BadRequest, NotFound
from sbx.jupyter.connection import ConnectionInfo

_SIZE_MAX = 64 * 1024
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Curve = Annotated[str, msgspec.Meta(pattern="^[!-~]{40}$")]  # 32 bytes as Z85


class _Fields(msgspec.Struct):
    """The keys that sbx reads; other programs may write more."""

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


def read(path: Path) -> ConnectionInfo:
    """Return the connection of the file. A missing file is like an empty one.

    Make a key if the file has none. Raise NotFound `connection_file_unreadable` and BadRequest
    `invalid_connection_file`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE_MAX + 1)
    except FileNotFoundError:
        data = b"{}"
    except OSError as error:
        raise NotFound(
            f"the connection file {path} cannot be read: {error.strerror}",
            code="connection_file_unreadable",
            hint="name the file that the client wrote, or one that does not exist yet",
        ) from None
    try:
        fields = msgspec.json.decode(data[:_SIZE_MAX], type=_Fields)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(
            f"{path} is not a connection file: {error}",
            code="invalid_connection_file",
            hint="it is a JSON object with ip, key and ports; without a file, sbx writes one",
        ) from None
    values = msgspec.structs.asdict(fields)
    values["key"] = (fields.key or secrets.token_hex(32)).encode()
    for name in ("curve_publickey", "curve_secretkey"):
        values[name] = values[name] and values[name].encode()
    return ConnectionInfo(**values)


@contextmanager
def telling(path: Path, bound: ConnectionInfo) -> Iterator[None]:
    """Keep the bound address in the file during the block. Remove the file afterwards if it did not
    exist before. Raise NotFound `connection_file_unreadable`."""
    was_there = path.exists()
    if not was_there or read(path) != bound:
        _write(path, bound)
    try:
        yield
    finally:
        if not was_there:
            path.unlink(missing_ok=True)


def _write(path: Path, bound: ConnectionInfo) -> None:
    """Write the file atomically, readable for its owner only: a client may read it at any time."""
    values = {name: value for name, value in asdict(bound).items() if value is not None}
    target = path.resolve()  # a symlink stays
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
            hint="name a file in a directory that belongs to you",
        ) from None
