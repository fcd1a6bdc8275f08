"""Connections of browsers: `console.sock` and the address of `--console`.

A page of any origin can send requests to a local address, and DNS can point any name to it. So a
request of a browser needs the exact name of the console (Host), the exact origin of its page
(Origin), and a header that no other page can add. The peer of the socket does not identify the
browser: it is `sbx console`, which forwards bytes of every program that connects to its port.

The console has a second name for frames with output of sandboxes. It serves these frames only, and
gets no cookie. The names of the ports of sandboxes (api/ports.py) are served here too, so that a
preview needs no other address: there a link identifies the caller, and nothing else.
"""

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbx.api.errors import error_response
from sbx.api.server.peer_credentials import PEER
from sbx.api.surfaces import OWN_ORIGIN
from sbx.errors import Denied, NotFound, SbxError

CONSOLE = "sbx.console"  # in the extensions of a scope
HEADER = b"x-sbx-console"
FRAMES = ("/console/frame.html", "/console/frame-scripts.html")
_SERVED = ("/console", "/api/v1", "/v1")  # each with all below it
_READS = ("GET", "HEAD")
NO_PAGE = "this page does not exist here"
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-dns-prefetch-control", b"off"),
    (
        b"permissions-policy",
        b"camera=(), microphone=(), geolocation=(), usb=(), serial=(), bluetooth=(), payment=()",
    ),
]
_OPENER = (b"cross-origin-opener-policy", b"same-origin")


class ConsoleSite(Struct, frozen=True):
    """The names under which a browser sees the console: `http://NAME:PORT`, and the origin of the
    frames. `cookie` is the name of its cookie. `is_frames`: the request is for the second name."""

    origin: str
    frames: str
    cookie: str
    is_frames: bool = False


class ConsoleListener(Struct, frozen=True):
    """The listeners of a service for browsers. `path` is a Unix socket, `address` the host and port
    of TCP. `urls` are the origins of a reverse proxy: that of the page and that of the frames."""

    name: str
    path: str | None = None
    address: tuple[str, int] | None = None
    urls: tuple[str, str] | None = None

    @property
    def names(self) -> list[str]:
        """Return the host names of the page, without ports."""
        proxied = [urlsplit(self.urls[0]).hostname or ""] if self.urls is not None else []
        return [self.name, "127.0.0.1", *proxied]

    @property
    def url(self) -> str | None:
        """Return the permanent origin of the page; None if there is only a Unix socket."""
        if self.urls is not None:
            return self.urls[0]
        return None if self.address is None else _origin(self.name, self.address[1])

    def accepted(self, scope: Scope) -> bool:
        """Return whether the connection of a request came to one of these listeners."""
        server = scope.get("server")
        if server is None:
            return False
        host, port = server
        if port is None:
            return host == self.path and host is not None
        if self.address is None or port != self.address[1]:
            return False
        return self.address[0] in (host, "0.0.0.0", "::")  # noqa: S104  # a comparison

    def site(self, scope: Scope) -> ConsoleSite:
        """Return the site that a request is for. Raise Denied `wrong_host`."""
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        name, _, port = host.decode("latin-1").partition(":")
        if self.urls is not None:
            page, frames = self.urls
            for url, is_frames in ((page, False), (frames, True)):
                if urlsplit(url).netloc == host.decode("latin-1"):
                    return ConsoleSite(page, frames, "sbx_console", is_frames)
        # A forwarded port is chosen by the person who forwards it.
        any_port = scope["server"][1] is None and port.isdecimal()
        if any_port or (self.address is not None and (port or "80") == str(self.address[1])):
            number = int(port or 80)
            for page, frames in (
                (self.name, self.name.replace(".", "-out.", 1)),
                ("127.0.0.1", "localhost"),
            ):
                if name in (page, frames):
                    # Every server of 127.0.0.1 gets its cookies, so they need different names.
                    cookie = "sbx_console" if page == self.name else f"sbx_console_{number}"
                    origins = _origin(page, number), _origin(frames, number)
                    return ConsoleSite(origins[0], origins[1], cookie, name == frames)
        raise Denied(
            "this address has another name",
            code="wrong_host",
            hint="open the link that sbx console prints",
        )


def site_of(scope: Mapping[str, object]) -> ConsoleSite | None:
    """Return the site of a request that came to a listener for browsers; None for any other."""
    extensions = scope.get("extensions")
    site = extensions.get(CONSOLE) if isinstance(extensions, dict) else None
    assert site is None or isinstance(site, ConsoleSite)
    return site


def is_local(site: ConsoleSite) -> bool:
    """Return whether the browser of a site is on this host, and not behind a reverse proxy."""
    name = urlsplit(site.origin).hostname or ""
    return name == "127.0.0.1" or name.endswith(".localhost")


def demanded_site(scope: Mapping[str, object]) -> ConsoleSite:
    """Return the site. Raise NotFound `console_elsewhere` at a listener for programs."""
    if (site := site_of(scope)) is None:
        raise NotFound(
            "the console is at another address",
            code="console_elsewhere",
            hint="open it with: sbx console",
        )
    return site


class ConsoleMiddleware:
    """Check the requests of browsers before they are routed, and add headers to the replies."""

    def __init__(self, app: ASGIApp, listener: ConsoleListener) -> None:
        self._app = app
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._listener.accepted(scope):
            await self._app(scope, receive, send)
            return
        if scope.get(OWN_ORIGIN):
            await self._app(_with_its_link_only(scope), receive, send)
            return
        cross_origin = scope["path"] in FRAMES  # the page of another origin shows it

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message.get("headers", ())}
                added = [*_HEADERS, _OPENER]
                if cross_origin:
                    added = [each for each in _HEADERS if b"resource-policy" not in each[0]]
                elif _has_cookie(scope) and b"cache-control" not in present:
                    added.append((b"cache-control", b"no-store"))
                message["headers"] = [
                    *message.get("headers", ()),
                    *(each for each in added if each[0] not in present),
                ]
            await send(message)

        try:
            site = self._listener.site(scope)
            _check(scope, site)
        except SbxError as error:
            request_id = scope.get("state", {}).get("request_id")
            await error_response(error, request_id)(scope, receive, sending)
            return
        scope["extensions"] = {**scope.get("extensions", {}), CONSOLE: site}
        await self._app(scope, receive, sending)


def _with_its_link_only(scope: Scope) -> Scope:
    """Return a request to the name of a port of a sandbox, in which only a link to this port
    identifies a caller: a page of the sandbox sends such requests too."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    extensions = {name: value for name, value in scope["extensions"].items() if name != PEER}
    return {**scope, "headers": headers, "extensions": extensions}


def _check(scope: Scope, site: ConsoleSite) -> None:
    """Raise Denied `forbidden` for a request of another page, and NotFound for a path that is not
    part of the console."""
    path: str = scope["path"]
    if site.is_frames or path in FRAMES:
        if not site.is_frames or path not in FRAMES or scope.get("method") not in _READS:
            raise NotFound(NO_PAGE)
        return
    if path != "/" and not any(path == each or path.startswith(f"{each}/") for each in _SERVED):
        raise NotFound(
            f"the console has no {path[:200]!r}",
            hint="programs use the socket of the service, or its address of --listen",
        )
    headers = dict(scope["headers"])
    if scope["type"] == "websocket":
        _check_origin(headers, site)
    elif scope["method"] not in _READS:
        _check_origin(headers, site)
        if headers.get(HEADER) != b"1":
            raise _foreign_page()
    elif path.startswith(("/api/", "/v1/")):
        # "none" is an address that the user typed or opened in a tab.
        fetched_by = headers.get(b"sec-fetch-site", b"same-origin")
        if fetched_by not in (b"same-origin", b"none"):
            raise _foreign_page()


def _check_origin(headers: Mapping[bytes, bytes], site: ConsoleSite) -> None:
    if headers.get(b"origin") != site.origin.encode():
        raise _foreign_page()


def _foreign_page() -> Denied:
    return Denied(
        "only the page of the console may do this",
        code="forbidden",
        hint="programs use the socket of the service, or its address of --listen, with a key",
    )


def cookie_of(request: HTTPConnection, site: ConsoleSite) -> str | None:
    return request.cookies.get(site.cookie)


def address_of(sock: socket.socket) -> tuple[str, int]:
    """Return the host and the port of a listening TCP socket."""
    host, port = sock.getsockname()[:2]
    return str(host), int(port)


def _has_cookie(scope: Scope) -> bool:
    return any(name == b"cookie" for name, _ in scope["headers"])


def _origin(host: str, port: int) -> str:
    return f"http://{host}" if port == 80 else f"http://{host}:{port}"
