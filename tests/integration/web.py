"""A web server of the host, and policies that may reach it: what tests of the proxy talk to.

It listens on 127.0.0.2, which is no loopback that programs go to without their proxy.
"""

import http.server
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from sbx.policy import Policy, load

ADDRESS = "127.0.0.2"


@dataclass
class Web:
    """`pages` are bodies by path; `asked` what came: path and headers."""

    port: int
    scheme: str = "http"
    address: str = ADDRESS
    pages: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"


@contextmanager
def web(
    pages: Mapping[str, bytes] | None = None,
    tls: ssl.SSLContext | None = None,
    address: str = ADDRESS,
) -> Iterator[Web]:
    """Served from a thread; a path that is not among the pages is greeted with its name."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            found.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            body = found.pages.get(self.path, f"hello from {self.path}".encode())
            self.send_response(200)
            kind = "text/html" if body.startswith(b"<") else "application/octet-stream"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = False
        block_on_close = True

        def handle_error(self, *words: Any) -> None:
            pass  # a client that hangs up

    server = Server((address, 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    scheme = "https" if tls else "http"
    found = Web(server.server_address[1], scheme, address, pages=dict(pages or {}))
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web() as site:
        yield site


def granting(site: Web) -> str:
    """The text of a policy in which a person may grant this site for an hour."""
    return (
        'schema = 1\nextends = "networked"\n'
        f'[network]\nallow_private = ["{ADDRESS}"]\n'
        f'[[grant]]\nnetwork = ["{site.host}"]\nlongest = "hour"\n'
    )


def networked(
    *allow: str,
    secrets: Mapping[str, Any] | None = None,
    grant: Sequence[Mapping[str, Any]] = (),
    **network: Any,
) -> Policy:
    """The shipped policy, with these hosts; 127.0.0.2 may be reached although it is private."""
    table = load("networked").model_dump(mode="json")
    table["network"] |= {"allow": list(allow), "allow_private": [ADDRESS], **network}
    table |= {"name": "net", "secrets": dict(secrets or {}), "grant": list(grant)}
    return Policy.model_validate(table)
