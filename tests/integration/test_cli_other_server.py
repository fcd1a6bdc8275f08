"""Commands that reach something else than a service of sbx report it."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import in_process

PAGES = {"object": b'{"hello": 1}', "list": b"[1]", "page": b"<html></html>", "nothing": b""}
WORDS = (
    ("ps",),
    ("create",),
    ("stats",),
    ("logs", "sandbox-1"),
    ("key", "list"),
    ("exec", "sandbox-1", "-c", "1"),
    ("cp", "sandbox-1:a", "-"),
)


@pytest.fixture(scope="module", params=PAGES)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    content = PAGES[request.param]

    class Other(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815  # the names of http.server

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_another_server_is_not_reported_as_a_bug_of_ours(
    address: str, words: tuple[str, ...]
) -> None:
    ended = in_process(*words, "--connect", address)
    assert ended.returncode == 3, ended.stderr
    assert f"error: the server at {address} is not an sbx service" in ended.stderr
    assert "hint: check the address: --connect, SBX_SOCKET or connect=" in ended.stderr


def test_a_file_that_is_no_socket_and_a_port_without_a_scheme(tmp_path: Path) -> None:
    file = tmp_path / "penguins.csv"
    file.touch()
    ended = in_process("ps", "--connect", file)
    assert (ended.returncode, f"error: {file} is not a socket" in ended.stderr) == (3, True)
    ended = in_process("ps", "--connect", "127.0.0.1:18444")
    assert ended.returncode == 3
    assert "http://127.0.0.1:18444" in ended.stderr  # an address of this host needs no scheme
    ended = in_process("ps", "--connect", "192.0.2.1:18444")
    assert ended.returncode == 2
    assert "hint: for a service on TCP, write http" in ended.stderr
