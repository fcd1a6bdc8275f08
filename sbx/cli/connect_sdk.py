"""`sbx connect`: how the SDK of another product reaches a service."""

import shlex
from typing import Annotated
from urllib.parse import urlsplit

import typer

from sbx.cli import connect as connecting
from sbx.cli import exits, output
from sbx.cli.terminal import STDOUT, write
from sbx.errors import BadRequest
from sbx.protocol.sdks import SDKS, Sdk, sdk_variables

_HOST = "127.0.0.1:8765"
_KEY = "sk-sbx-…"


def connect(
    sdk: Annotated[Sdk, typer.Argument(help="The SDK.", metavar="|".join(SDKS))],
    address: connecting.Address = None,
    key: connecting.Key = None,
    as_json: connecting.Json = False,
) -> int:
    """Print the environment variables for an SDK of another product.

    The SDK needs a service on TCP: sbx serve --listen 127.0.0.1:8765. Name it by --connect
    http://HOST:PORT; the key is that of --key or SBX_KEY.
    """
    host = _host(address)
    variables = sdk_variables(sdk, host, key or _KEY)
    if as_json:
        output.document(variables)
        return exits.Exit.OK
    for name, value in variables.items():
        write(STDOUT, f"export {name}={shlex.quote(value)}\n")
    if key is None:
        output.note("sbx key create prints a key to put there")
    if address is None or "://" not in address:
        output.note(f"start the service with sbx serve --listen {host}")
    return exits.Exit.OK


def _host(address: str | None) -> str:
    """Return host and port. Raise BadRequest for an address with something else."""
    if address is None or "://" not in address:
        return _HOST
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.netloc or parts.path not in ("", "/"):
        raise BadRequest(
            f"{address} is not an address such as http://{_HOST}",
            hint="name the service as http://HOST:PORT",
        )
    return parts.netloc
