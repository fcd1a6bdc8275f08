"""`sbx console`: open the web page of the service in a browser.

The command requests a one-time code as its user, and forwards a local port to the socket that the
service has for browsers. It parses none of the bytes. That socket, unlike `sbx.sock`, does not
identify its peer: every program of this host can connect to the port.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.agent_options import EnvFile, note_ignored
from sbx.cli.terminal import STDOUT, one_line, write
from sbx.errors import BadRequest, Unavailable

if TYPE_CHECKING:
    import asyncio

    from sbx.client import Client

_START_S = 60.0
_PIECE = 64 << 10
_CODES = "/api/v1/console/codes"


def console(
    port: Annotated[
        int,
        typer.Option(help="The local port; 0: a free one.", metavar="N", min=0, max=65535),
    ] = 0,
    host: Annotated[
        str | None,
        typer.Option(
            help="The name in the link, for a browser that does not know names below localhost:"
            " 127.0.0.1. Other local servers get the cookie then.",
            metavar="NAME",
        ),
    ] = None,
    path: Annotated[str, typer.Option(help="The page to open.", metavar="PATH")] = "/console/",
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Show the link, and open no browser.")
    ] = False,
    only_link: Annotated[
        bool, typer.Option("--print", help="Print only the link, and open no browser.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print url, expires_at and origin; open no browser.")
    ] = False,
    no_operator: Annotated[
        bool, typer.Option("--no-operator", help="Log in without the rights of an operator.")
    ] = False,
    socket: connect.Address = None,
    key: connect.Key = None,
    env_file: EnvFile = None,
) -> int:
    """Open the console: conversations, approvals and live sandboxes in a browser.

    The link logs one browser in, once, within a minute. It needs no key and no password. Enter
    shows another link; Ctrl-C ends the command. Without a service, the command starts one, and ends
    it at its own end. That service reads no settings of the working directory; --env-file names a
    file for it. For a service on another host, forward its console.sock with SSH.
    """
    new = {"operator": not no_operator, "path": path}
    opened = _Console(new, port, host, quiet=only_link or as_json, as_json=as_json)
    opened.browser = not (no_browser or only_link or as_json)
    try:
        with suppress(KeyboardInterrupt), _service(socket, env_file):
            connect.ask(socket, key, opened.run)
    except exits.StoppedBySignal as stopped:
        if stopped.signal != signal.SIGINT:  # Ctrl-C is the way to end it
            raise
    return exits.Exit.OK


class _Console:
    """The links of one command, and its local port."""

    def __init__(
        self, new: dict[str, Any], port: int, host: str | None, *, quiet: bool, as_json: bool
    ) -> None:
        self.browser = False
        self._new = new
        self._port = port
        self._host = host
        self._quiet = quiet
        self._as_json = as_json

    async def run(self, client: "Client") -> None:
        """Show a link. With a local port, forward it until Ctrl-C, and show a link at Enter."""
        import asyncio  # help does not need them

        from sbx.cli.signals import CancelOnSignal

        code = await client.request("POST", _CODES, json=self._new)
        if code["url"] is not None and self._host is None:
            self._show(code, code["url"])
            return
        if code["socket"] is None or not os.access(code["socket"], os.R_OK | os.W_OK):
            raise Unavailable(
                "the socket of the console is not on this host, or not yours",
                code="console_elsewhere",
                hint="forward it with ssh -L, or serve with --console HOST:PORT",
            )
        name = self._host or code["names"][0]
        if name not in code["names"]:
            raise BadRequest(
                f"the console has no name {name!r}",
                hint=f"choose one of {', '.join(code['names'])}",
            )
        server = await asyncio.start_server(_forwarder(code["socket"]), "127.0.0.1", self._port)
        with CancelOnSignal():
            await self._serve(client, code, name, server)

    async def _serve(
        self, client: "Client", code: dict[str, Any], name: str, server: "asyncio.Server"
    ) -> None:
        async with server:
            local = server.sockets[0].getsockname()[1]
            origin = f"http://{name}" if local == 80 else f"http://{name}:{local}"
            self._show(code, origin)
            if not self._quiet:
                output.note("press Enter for another link, Ctrl-C to end")
            enters = _enters()
            while True:
                await enters.wait()
                enters.clear()
                self.browser = False
                self._show(await client.request("POST", _CODES, json=self._new), origin)

    def _show(self, code: dict[str, Any], origin: str) -> None:
        url = f"{origin}{code['path']}#login={code['code']}"
        if self._as_json:
            output.document({"url": url, "expires_at": code["expires_at"], "origin": origin})
            return
        write(STDOUT, f"{one_line(url)}\n")
        if self.browser:
            import webbrowser
            from contextlib import chdir

            with chdir("/"):  # neither a browser nor PATH may mean a file of a workspace
                is_open = webbrowser.open(url)
            if not is_open:
                output.note("no browser could be opened: open the link within a minute")


def _enters() -> "asyncio.Event":
    """Return the event that Enter sets; without a terminal nothing sets it."""
    import asyncio

    pressed = asyncio.Event()

    def read() -> None:
        if os.read(sys.stdin.fileno(), 1024):
            pressed.set()
        else:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())

    if sys.stdin is not None and sys.stdin.isatty():
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read)
    return pressed


def _forwarder(path: str) -> Any:
    """Return the handler of a connection: it forwards the bytes in both directions."""
    import asyncio

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_PIECE):
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(path)
            writers.append(inner_writer)
            await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))
        except OSError:
            pass  # the service restarts: the browser tries again
        finally:
            for each in writers:
                each.close()

    return forward


@contextmanager
def _service(socket: str | None, env_file: Path | None) -> Iterator[None]:
    """Start a service as a child if none answers at the default socket, and end it afterwards."""
    import subprocess
    import time

    from sbx.client.address import address_of
    from sbx.own_python import own_module

    address = address_of(socket)
    if address.path is None or _answers(address.path):
        yield
        return
    output.note(f"no service answers at {address.path}: starting one")
    named = () if env_file is None else ("--env-file", os.path.abspath(env_file))
    if env_file is None:
        note_ignored()
    child = subprocess.Popen(  # this program
        own_module("sbx", "serve", "--socket", os.path.abspath(address.path), *named),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env=absolute_paths(os.environ),
        cwd="/",
    )
    try:
        until = time.monotonic() + _START_S
        while not _answers(address.path):
            if child.poll() is not None or time.monotonic() > until:
                raise Unavailable(
                    "the service did not start",
                    code="service_unreachable",
                    hint="its output above has the reason",
                )
            time.sleep(0.05)
        yield
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_START_S)


def absolute_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a service in another directory: relative paths of settings become
    absolute ones."""
    import json

    from sbx.api.server.settings import ServiceSettings, parsed, variables_of

    variables, fields = dict(environment), ServiceSettings.model_fields
    paths = {each: name for name in fields for each in variables_of(name)}
    paths = {each: name for each, name in paths.items() if "Path" in str(fields[name].annotation)}
    for variable, field in {"SBX_CONFIG": "data_dir", **paths}.items():
        if text := environment.get(variable):
            by_colon = field == "policy_dirs"
            value = text.split(os.pathsep) if by_colon else parsed(field, text)
            parts = [value] if isinstance(value, str) else value
            absolute = [os.path.abspath(os.path.expanduser(part)) for part in parts]
            is_list = parts is value and not by_colon
            variables[variable] = json.dumps(absolute) if is_list else os.pathsep.join(absolute)
    return variables


def _answers(path: str) -> bool:
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
