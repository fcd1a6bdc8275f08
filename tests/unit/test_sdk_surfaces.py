"""The pure parts of the surfaces for SDKs of other products."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from sbx.api.inner_files import inner_path, is_in_workspace
from sbx.api.line_events import LineBuffer
from sbx.api.opensandbox import commands
from sbx.api.opensandbox.stream import encode
from sbx.api.surfaces import OPENSANDBOX, own_origin, surface_of
from sbx.api.templates import cpu_count, memory_size
from sbx.cli.connect_sdk import _host
from sbx.errors import BadRequest, Denied, NotFound
from sbx.policy.templates import policy_of
from sbx.protocol.sdks import sdk_variables

TEMPLATES = {"base": "default", "ubuntu*": "strict", "ubuntu:lab": "lab"}


@pytest.mark.parametrize(
    ("name", "policy"), [("base", "default"), ("ubuntu:22.04", "strict"), ("ubuntu:lab", "lab")]
)
def test_a_template_has_its_policy_by_name_before_a_pattern(name: str, policy: str) -> None:
    assert policy_of(TEMPLATES, name) == policy


def test_an_unknown_template_has_one_only_if_the_operator_configures_that() -> None:
    with pytest.raises(NotFound) as raised:
        policy_of(TEMPLATES, "debian")
    assert raised.value.code == "unknown_template"
    assert policy_of({**TEMPLATES, "*": "strict"}, "debian") == "strict"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512m", 512 << 20), ("1g", 1 << 30), ("2Gi", 2 << 30), ("64MiB", 64 << 20), (1000, 1000),
     ("1.5G", 3 << 29), ("100B", 100)],
)  # fmt: skip
def test_sizes_of_docker_and_kubernetes(text: object, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1g", "1x", "1gg", "9" * 20])
def test_no_sizes(text: str) -> None:
    with pytest.raises(BadRequest):
        memory_size(text)


@pytest.mark.parametrize(("text", "count"), [("500m", 0.5), ("2", 2.0), (0.25, 0.25)])
def test_numbers_of_cpus(text: object, count: float) -> None:
    assert cpu_count(text) == count


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "0m"])
def test_no_numbers_of_cpus(text: str) -> None:
    with pytest.raises(BadRequest):
        cpu_count(text)


def request(path: str, **headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "path": path, "headers": named, "query_string": b""})


def test_the_path_decides_the_surface() -> None:
    assert surface_of({"path": "/opensandbox/v1/sandboxes"}) is OPENSANDBOX
    for path in ("/v1/sandboxes", "/opensandboxes/x", "/", "/opensandbox"):
        assert surface_of({"path": path}) is None


def test_the_credential_of_each_surface() -> None:
    key = "sk-sbx-" + "a" * 64
    assert OPENSANDBOX.credential(request("/x", open_sandbox_api_key=key)) == key
    assert OPENSANDBOX.credential(request("/x")) is None
    assert OPENSANDBOX.credential(request("/x", open_sandbox_api_key=" ")) is None
    for wrong in ("short", "with space " * 5, "\u00e4" * 30):
        with pytest.raises(Denied) as raised:
            OPENSANDBOX.credential(request("/x", open_sandbox_api_key=wrong))
        assert raised.value.code == "malformed_key"


def test_a_link_counts_only_on_a_path_with_its_sandbox() -> None:
    path = "/opensandbox/v1/sandboxes/box/proxy/44772"
    assert OPENSANDBOX.link(request(f"{path}/ping", sbx_link="x")) == ("x", "box", None)
    assert OPENSANDBOX.link(request(path, sbx_link="x")) == ("x", "box", None)
    assert OPENSANDBOX.link(request(f"{path}/ping")) is None
    assert OPENSANDBOX.link(request("/opensandbox/v1/sandboxes/box", sbx_link="x")) is None


def test_error_bodies_have_the_fields_of_each_sdk() -> None:
    error: dict[str, Any] = {"code": "not_found", "message": "gone", "hint": "list them"}
    assert OPENSANDBOX.error_body(error, 404) == {
        "code": "NOT_FOUND",
        "message": "gone (list them)",
    }
    error["details"] = {"sandbox_id": "x"}
    body = OPENSANDBOX.error_body(error, 404)
    assert isinstance(body, dict)
    assert body["code"] == "DOCKER::SANDBOX_NOT_FOUND"


def test_lines_wait_for_their_end() -> None:
    lines = LineBuffer()
    assert lines.feed("stdout", "a") == ""
    assert lines.feed("stderr", "x\ny") == "x\n"
    assert lines.feed("stdout", "b\nc\nd") == "ab\nc\n"
    assert lines.flush() == [("stdout", "d"), ("stderr", "y")]
    assert lines.flush() == []


@given(st.lists(st.tuples(st.sampled_from(("stdout", "stderr")), st.text("ab\n", max_size=5))))
def test_no_text_is_lost_or_moved(pieces: list[tuple[str, str]]) -> None:
    lines = LineBuffer()
    sent = [(stream, lines.feed(stream, text)) for stream, text in pieces]
    assert all(text == "" or text.endswith("\n") for _, text in sent)
    sent += lines.flush()
    for stream in ("stdout", "stderr"):
        whole = "".join(text for name, text in pieces if name == stream)
        assert "".join(text for name, text in sent if name == stream) == whole


@given(st.text())
def test_an_event_is_one_line_of_ascii(text: str) -> None:
    data = encode(1, {"type": "stdout", "timestamp": 1, "text": text})
    assert data.isascii()
    assert data.endswith(b"\n\n")
    body = data.removeprefix(b"data: ").removesuffix(b"\n\n")
    assert len(body.decode().splitlines()) == 1
    assert json.loads(body)["text"] == text


def test_a_failed_stream_ends_with_an_error_event() -> None:
    data = encode(3, {"type": "failure", "error": {"code": "closed", "message": "it ended"}})
    sent = json.loads(data.removeprefix(b"data: "))
    assert sent["type"] == "error"
    assert sent["error"] == {"ename": "closed", "evalue": "it ended", "traceback": []}


@pytest.mark.parametrize(
    ("path", "inside", "in_workspace"),
    [
        ("/tmp/x", "/tmp/x", False),
        ("x/y", "/workspace/x/y", True),
        ("~", "/workspace", False),
        ("~/x", "/workspace/x", True),
        ("/workspace/../etc/x", "/etc/x", False),
        ("/workspacex", "/workspacex", False),
        ("../../x", "/x", False),
    ],
)
def test_paths_inside(path: str, inside: str, in_workspace: bool) -> None:
    assert inner_path(path) == inside
    assert is_in_workspace(inside) is in_workspace


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_paths(path: str) -> None:
    with pytest.raises(BadRequest):
        inner_path(path)


def test_variables_of_the_sdks() -> None:
    assert sdk_variables("e2b", "h:1", "sk-sbx-00ff") == {
        "E2B_API_URL": "http://h:1",
        "E2B_SANDBOX_URL": "http://h:1",
        "E2B_API_KEY": "e2b_00ff",
    }
    assert sdk_variables("opensandbox", "h:1", "k") == {
        "OPEN_SANDBOX_DOMAIN": "h:1/opensandbox",
        "OPEN_SANDBOX_API_KEY": "k",
    }


def test_the_host_of_an_address() -> None:
    assert _host("http://127.0.0.1:9/") == "127.0.0.1:9"
    assert _host(None) == _host("/run/sbx.sock") == "127.0.0.1:8765"
    for address in ("https://x", "http://x/prefix", "ftp://x"):
        with pytest.raises(BadRequest):
            _host(address)


@pytest.mark.parametrize(
    ("host", "place"),
    [
        (b"8000-sandbox-5a7afa86d151.localhost", ("sandbox-5a7afa86d151", "8000")),
        (b"8000-sandbox-5a7afa86d151.localhost:8765", ("sandbox-5a7afa86d151", "8000")),
        (b"8000-sandbox-5a7afa86d151.example.org", None),
        (b"8000-sandbox-5a7afa86d151.localhost.example.org", None),
        (b"x.8000-sandbox-5a7afa86d151.localhost", None),
        (b"8000-other.localhost", None),
        (b"localhost:8765", None),
        (b"", None),
    ],
)
def test_a_name_of_one_port(host: bytes, place: tuple[str, str] | None) -> None:
    assert own_origin(host) == place


def test_parsed_variables_are_kept_within_some_mebibytes() -> None:
    """The number of variables was limited, and one may have 64 KiB: 9,000 changes of a file took
    600 MiB of the service."""
    try:
        for number in range(300):
            commands._parsed["box", float(number), 1] = {"A": "x" * (64 << 10)}
        assert 0 < sum(len(each["A"]) for each in commands._parsed.values()) <= 8 << 20
    finally:
        commands._parsed.clear()
