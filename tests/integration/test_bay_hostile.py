"""What bad input gets over the socket: a 4xx of our shape, soon, and nothing is left of it."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from bay_calls import made
from live_app import Served

from sbx.api import middleware


@pytest_asyncio.fixture(scope="module")
async def box(client: httpx.AsyncClient) -> str:
    return f"/v1/sandboxes/{(await made(client))['id']}"


@pytest_asyncio.fixture(autouse=True)
async def nothing_changes(client: httpx.AsyncClient, box: str) -> AsyncIterator[None]:
    """After each attack the service answers, and the workspace is as it was."""
    before = (await client.get(f"{box}/filesystem/directories")).json()["entries"]
    yield
    after = (await client.get(f"{box}/filesystem/directories")).json()["entries"]
    assert [entry["name"] for entry in after] == [entry["name"] for entry in before]


def reply_of(answer: bytes) -> tuple[int, str]:
    """Status and code of a raw reply."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), answer[:200]
    status = int(head.split(b" ", 2)[1])
    reported = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])  # it may come in chunks
    assert reported["error"]["message"]
    assert reported["error"]["request_id"]
    return status, reported["error"]["code"]


def refused(reply: httpx.Response) -> None:
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["request_id"]


def request(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: sbx", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + body


# -- paths and ids ---------------------------------------------------------------------------------

PATHS = [
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "%2e%2e%2f",
    "%252e%252e%252fetc", "..%5c..%5cetc", "..%c0%af..%c0%afetc", "%c0%ae%c0%ae/", "%ff%fe",
    "%00", "a%00.txt", "%0a", "%0d%0aSet-Cookie:x=1", "%1b[31m", "a%7f", "%ed%a0%80",
    "%2fetc%2fpasswd", "//etc/passwd", "x" * 5000, "%e2%80%ae" + "../" * 50, "C:%5cWindows%5c..",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_no_spelling_of_a_path_leads_out(served: Served, box: str, path: str) -> None:
    for method, route in (
        ("GET", "files"), ("DELETE", "files"), ("GET", "download"), ("GET", "directories"),
    ):  # fmt: skip
        answer = await served.raw(request(method, f"{box}/filesystem/{route}?path={path}"))
        status, _ = reply_of(answer)
        assert 400 <= status < 500


@pytest.mark.parametrize("name", PATHS)
async def test_no_spelling_of_an_id_finds_anything(served: Served, name: str) -> None:
    for rest in ("", "/filesystem/directories", "/history", "/events"):
        answer = await served.raw(request("GET", f"/v1/sandboxes/{name}{rest}"))
        status, _ = reply_of(answer)
        assert 400 <= status < 500


@pytest.mark.parametrize(
    "target", ["*", "http://[::1", "/%", "/%zz", "/v1/sandboxes/%", "/\x01", "/v1?\x00", "é", ""]
)
async def test_a_target_that_is_none_is_refused(served: Served, target: str) -> None:
    status, _ = reply_of(await served.raw(request("GET", target)))
    assert 400 <= status < 500


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        ("Authorization: Bearer a", "Authorization: Bearer b"),
        ("Idempotency-Key: a", "Idempotency-Key: b"),
        ("Content-Type: application/json", "Content-Type: text/plain"),
        ("Content-Length: 2", "Content-Length: 3"),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Content-Length: -1",),
        ("Content-Length: 99999999999999999999999999",),
        ("Content-Length: x",),
        ("Transfer-Encoding: chunked, gzip, chunked",),
        ("Host: b",),
        ("Bad Header: x",),
        ("X: a\x00b",),
        tuple(f"X-{number}: 1" for number in range(500)),
        ("X-Long: " + "x" * 100_000,),
    ],
    ids=str,
)
async def test_heads_that_contradict_or_flood_are_refused(
    served: Served,
    headers: tuple[str, ...],
) -> None:
    answer = await served.raw(request("POST", "/v1/sandboxes", *headers, body=b"{}"))
    status, _ = reply_of(answer)
    assert 400 <= status < 500


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("HTTP/1.0", 200),
        ("HTTP/1.1", 400),
    ],
)
async def test_a_request_names_one_host(served: Served, head: str, status: int) -> None:
    answer = await served.raw(f"GET /health {head}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize(
    "data",
    [b"\r\n" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\nHost: x\r\n\r\n"],
)
async def test_what_is_no_http_is_refused(served: Served, data: bytes) -> None:
    answer = await served.raw(data, then_end=True)
    if answer:
        assert 400 <= reply_of(answer)[0] < 500


# -- bodies ----------------------------------------------------------------------------------------


async def test_a_body_that_stops_is_given_up(
    served: Served,
    box: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "IDLE_S", 0.3)
    for path, kind, begun in (
        ("/v1/sandboxes", "application/json", b"{"),
        (f"{box}/filesystem/upload", "multipart/form-data; boundary=b", b"--b\r\n"),
    ):
        head = request("POST", path, "Content-Length: 500", f"Content-Type: {kind}")
        assert reply_of(await served.raw(head + begun))[0] == 408


async def test_a_body_that_is_cut_off_leaves_nothing(served: Served, box: str) -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="path"\r\n\r\ncut.txt\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 1000
    )
    kind = "Content-Type: multipart/form-data; boundary=b"
    path = f"{box}/filesystem/upload"
    longer = request("POST", path, kind, f"Content-Length: {len(form) + 999}", body=form)
    await served.raw(longer, then_end=True)
    exact = request("POST", path, kind, f"Content-Length: {len(form)}", body=form)
    assert reply_of(await served.raw(exact))[0] == 400
    chunked = request("POST", path, kind, "Transfer-Encoding: chunked")
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(form), form)
    assert reply_of(await served.raw(chunked + body))[0] == 400
    broken = chunked + b"zz\r\n"
    assert 400 <= reply_of(await served.raw(broken))[0] < 500


async def test_ten_thousand_fields_are_refused(client: httpx.AsyncClient, box: str) -> None:
    one = b'--b\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n1\r\n'
    form = b"".join(one % number for number in range(10_000)) + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    refused(await client.post(f"{box}/filesystem/upload", content=form, headers=headers))
    headers = {"content-type": "application/x-www-form-urlencoded"}
    body = b"&".join(b"f%d=1" % number for number in range(10_000))
    for path in ("/v1/sandboxes", f"{box}/filesystem/upload", f"{box}/python/exec"):
        refused(await client.post(path, content=body, headers=headers))


@pytest.mark.parametrize(
    "form",
    [
        b"",
        b"--b",
        b"--b--\r\n",
        b"--other\r\n\r\n--other--",
        b"--b\r\n\r\n\r\n--b--",
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="path"\r\n\r\n%s\r\n--b--' % (b"x" * 200_000),
        b'--b\r\nX: ' + b"x" * 100_000 + b"\r\n\r\n\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="path"\r\n\r\n\xff\xfe\r\n--b--',
        b'--b\r\nContent-Disposition: attachment; name="file"; filename="x"\r\n\r\nx\r\n--b--',
    ],
)  # fmt: skip
async def test_a_form_that_is_none_is_refused(
    client: httpx.AsyncClient,
    box: str,
    form: bytes,
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    refused(await client.post(f"{box}/filesystem/upload", content=form, headers=headers))


@pytest.mark.parametrize(
    "boundary", ["", "b" * 10_000, '"', "a b; boundary=c", "é", "boundary=", "\\"]
)
async def test_a_boundary_that_is_none_is_refused(
    client: httpx.AsyncClient,
    box: str,
    boundary: str,
) -> None:
    headers = {b"content-type": f"multipart/form-data; boundary={boundary}".encode()}
    refused(await client.post(f"{box}/filesystem/upload", content=b"--b--", headers=headers))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'"x"', b"{}" * 2, b"\xff", b"\x00", b'{"code": }',
        b'{"code": "' + b"\\u0000" * 3 + b'", "timeout": 1e400}', b"[" * 200_000,
        b'{"code":' * 100_000, b'{"code": "1", "timeout": ' + b"9" * 5000 + b"}",
        b'{"code": "\\ud800"}', b'{"code": NaN}',
    ],
    ids=lambda body: str(body[:30]),
)  # fmt: skip
async def test_json_that_is_none_is_refused(
    client: httpx.AsyncClient,
    box: str,
    body: bytes,
) -> None:
    headers = {"content-type": "application/json"}
    refused(await client.post(f"{box}/python/exec", content=body, headers=headers))


@pytest.mark.parametrize(
    "path", ["/v1/sandboxes/uploads/extend_ttl", "/api/v1/sessions/uploads/execute"]
)
async def test_an_id_that_reads_like_a_route_of_files_opens_no_endless_body(
    served: Served, path: str
) -> None:
    head = request("POST", path, "Content-Length: 3000000", "Content-Type: application/json")
    assert reply_of(await served.raw(head)) == (413, "body_too_large")


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/api/v1/sessions"])
async def test_no_body_is_waited_for_of_somebody_unknown(served: Served, path: str) -> None:
    reported = (
        "Authorization: Bearer nobody",
        "Content-Type: application/json",
        "Content-Length: 100",
    )
    answer = await served.raw(request("POST", path, *reported))
    assert reply_of(answer) == (401, "unauthorized")


async def test_a_wrong_method_is_405_and_says_which_are_right(client: httpx.AsyncClient) -> None:
    reply = await client.request("TRACE", "/v1/sandboxes")
    refused(reply)
    reply = await client.put("/v1/sandboxes")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "GET, POST"


async def test_many_slow_clients_do_not_stop_the_others(
    served: Served,
    client: httpx.AsyncClient,
) -> None:
    head = request("POST", "/v1/sandboxes", "Content-Length: 100")
    slow = [asyncio.create_task(served.raw(head)) for _ in range(100)]
    await asyncio.sleep(0.2)
    assert (await client.get("/health")).status_code == 200
    assert not any(one.done() for one in slow)
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
