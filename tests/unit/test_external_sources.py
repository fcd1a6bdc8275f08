"""Files of external tools, and the requests that calls become: whole values, without a server."""

import json
from pathlib import Path
from typing import Any

import pytest

from sbx.agent.external.http import Operation, endpoint, operations, read_document, request_for
from sbx.agent.external.source import (
    HttpSource,
    OpenApiSource,
    filled,
    parse_source,
    read_source,
    source_files,
)
from sbx.agent.tools.tool import ToolDefinition
from sbx.errors import BadRequest
from sbx.settings_files import to_toml

TWICE = {"in": "query", "name": "id", "required": True}
WHOLE = """
description = "Weather"
agents = ["tables"]
owners = ["acme"]
users = ["ann"]
scope = "files:read"
approval = "allow"
timeout = 5
calls_per_minute = 3
result_max = 1000
idempotent = true

[secrets]
key = "env:WEATHER_KEY"

[mcp]
command = ["weather", "--stdio"]
tools = ["now"]

[mcp.env]
KEY = "${key}"
PRICE = "5 $$"
"""


def test_a_file_with_all_fields_and_back() -> None:
    source = parse_source(WHOLE, "weather.toml")
    assert source.kind == "mcp"
    assert source.allows("acme", "ann", "tables")
    assert not source.allows("other", "ann", "tables")
    assert not source.allows("acme", "bob", "tables")
    assert not source.allows("acme", "ann", "other")
    assert not source.allows(None, None, None)
    assert source.mcp is not None
    values = filled(source.mcp.env, {"key": "value of the key"})
    assert values == {"KEY": "value of the key", "PRICE": "5 $"}
    again = to_toml(source.model_dump(mode="json", exclude_defaults=True))
    assert parse_source(again, "again") == source


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "exactly one of the tables"),
        ('[mcp]\ncommand = ["a"]\n[http]\nurl = "http://h"', "exactly one of the tables"),
        ("[mcp]", "either command or url"),
        ('[mcp]\ncommand = ["a"]\nurl = "http://h"', "either command or url"),
        ("[mcp]\ncommand = []", "command"),
        ('[http]\nurl = "ftp://h"', "must be an address"),
        ('[http]\nurl = "http://user:word@h/"', "without a user"),
        ('[http]\nurl = "http://{host}/"', "only the path"),
        ('[http]\nurl = "http://h/?q={q}"', "only the path"),
        ('[http]\nurl = "http://h/{city}"', "must require city"),
        ('[http]\nurl = "http://h"\nheaders = { A = "${key}" }', "not in the table secrets"),
        ('[http]\nurl = "http://h"\nheaders = { A = "$ 5" }', "neither $$ nor"),
        ('[http]\nurl = "http://h"\n[http.parameters]\ntype = "array"', "type"),
        ('[http]\nurl = "http://h"\n[http.parameters]\ntype = "object"\nrequired = 3', "required"),
        (
            '[http]\nurl = "http://h?role=user"\n[http.parameters]\ntype = "object"\n'
            'properties.role = { type = "string" }',
            "role, which url sets already",
        ),
        ('[python]\nfunction = "os.system"', "function"),
        ('cache = 5\n[http]\nurl = "http://h"', "idempotent"),
        ('[secrets]\nkey = "sk-12345678"\n[http]\nurl = "http://h"', "location of a secret"),
        ('scope = "admin"\n[http]\nurl = "http://h"', "scope"),
        ('more = 1\n[http]\nurl = "http://h"', "no such field"),
        ("[http", "Expected"),
    ],
)
def test_a_wrong_file_names_the_problem(text: str, problem: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_source(text, "weather.toml")
    assert raised.value.code == "invalid_tool"
    problems = (raised.value.details or {})["problems"]
    assert any(problem in each for each in problems), problems
    assert "sk-12345678" not in f"{raised.value.message} {problems}"


def test_files_of_a_directory(tmp_path: Path) -> None:
    assert source_files(tmp_path / "missing") == {}
    (tmp_path / "a.toml").write_text('[openapi]\ndocument = "a.json"')
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "run_code.toml").write_text(WHOLE)
    files = source_files(tmp_path)
    assert files == {name: tmp_path / f"{name}.toml" for name in ("a", "run_code")}
    source = read_source(files["a"])
    assert source.openapi is not None
    assert source.openapi.document == tmp_path / "a.json"
    with pytest.raises(BadRequest):
        read_source(files["run_code"])
    files["a"].chmod(0o666)
    with pytest.raises(BadRequest, match="every user of this host can write it"):
        read_source(files["a"])
    files["a"].chmod(0o644)
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(BadRequest, match="not UTF-8"):
        read_source(files["a"])


def operation(method: str, url: str, **places: Any) -> Operation:
    return Operation(ToolDefinition("t", "", {}), method, url, places)


@pytest.mark.parametrize(
    ("chosen", "arguments", "request_"),
    [
        (
            operation("GET", "http://h/a/{id}"),
            {"id": 7, "q": "x y", "all": True, "tags": ["a", 1]},
            {
                "method": "GET",
                "url": "http://h/a/7?q=x%20y&all=true&tags=a&tags=1",
            },
        ),
        (
            operation("POST", "http://h/a"),
            {"text": "hello", "more": {"n": 1}},
            {"method": "POST", "url": "http://h/a", "json": {"text": "hello", "more": {"n": 1}}},
        ),
        (operation("POST", "http://h"), {}, {"method": "POST", "url": "http://h", "json": {}}),
        (
            operation("PUT", "http://h", **{"X-Id": "header", "body": "body", "q": "query"}),
            {"X-Id": "3", "body": [1], "q": "r"},
            {
                "method": "PUT",
                "url": "http://h?q=r",
                "headers": {"X-Id": "3"},
                "json": [1],
            },
        ),
        (
            operation("GET", "http://h/{a}/{b}"),
            {"a": "{b}", "b": "x/../y?#"},
            {"method": "GET", "url": "http://h/%7Bb%7D/x%2F..%2Fy%3F%23"},
        ),
        (
            operation("GET", "http://h/orders?tenant=acme&readonly=true"),
            {"q": "1"},
            {"method": "GET", "url": "http://h/orders?tenant=acme&readonly=true&q=1"},
        ),
        (
            operation("GET", "http://h/u/{user-id}/x/{user.name}"),
            {"user-id": "7", "user.name": "ann"},
            {"method": "GET", "url": "http://h/u/7/x/ann"},
        ),
    ],
)
def test_a_call_becomes_a_request(
    chosen: Operation, arguments: dict[str, Any], request_: dict[str, Any]
) -> None:
    assert request_for(chosen, arguments) == request_


@pytest.mark.parametrize(
    ("place", "value"),
    [("path", ".."), ("path", "."), ("path", ""), ("header", "a\r\nHost: x"), ("header", "ä")],
)
def test_a_value_that_would_change_the_request_is_refused(place: str, value: str) -> None:
    url = "http://h/{id}" if place == "path" else "http://h"
    with pytest.raises(BadRequest) as raised:
        request_for(operation("GET", url, id=place), {"id": value})
    assert raised.value.code == "invalid_arguments"


def test_an_argument_does_not_replace_a_fixed_value_of_the_query() -> None:
    """The query of a call replaced that of the operator, such as `role=user`."""
    with pytest.raises(BadRequest) as raised:
        request_for(operation("GET", "http://h?role=user"), {"role": "admin"})
    assert raised.value.code == "invalid_arguments"


def test_server_variables_have_their_defaults(tmp_path: Path) -> None:
    """Each call failed with KeyError, and an argument `host` became a part of the address."""
    path = tmp_path / "api.json"
    server = {
        "url": "https://{host}/{version}",
        "variables": {"host": {"default": "h"}, "version": {"default": "v2"}},
    }
    places = [{"in": "query", "name": "host"}]
    document = {
        "openapi": "3.0.0",
        "servers": [server],
        "paths": {"/u/{user-id}": {"get": {"operationId": "user", "parameters": places}}},
    }
    path.write_text(json.dumps(document))
    (user,) = operations("api", read_document(path), OpenApiSource(document=path))
    assert user.definition.parameters["required"] == ["user-id"]
    assert request_for(user, {"user-id": "a b", "host": "evil"}) == {
        "method": "GET",
        "url": "https://h/v2/u/a%20b?host=evil",
    }


def test_an_endpoint_describes_itself() -> None:
    source = HttpSource(url="http://h/x")
    assert endpoint("x", source, "").definition == ToolDefinition(
        "x", "GET http://h/x", {"type": "object", "properties": {}}
    )


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"swagger": "2.0"}, "OpenAPI 3"),
        ({"openapi": "3.0.0", "paths": {}}, "lacks a server"),
        ({"openapi": "3.0.0", "servers": [{"url": "/v1"}], "paths": {}}, "no plain address"),
        (
            {"openapi": "3.0.0", "servers": [{"url": "http://{host}"}], "paths": {}},
            "lacks a server",
        ),
        ({"openapi": "3.0.0", "servers": [{"url": "http://h?a=1"}], "paths": {}}, "no plain"),
        (
            {
                "openapi": "3.0.0",
                "servers": [{"url": "http://h"}],
                "paths": {"/{id}": {"get": {"parameters": [TWICE]}}},
            },
            "breaks its format",
        ),
        ({"openapi": "3.0.0", "servers": [{"url": "http://h"}]}, "breaks its format"),
        (
            {
                "openapi": "3.0.0",
                "servers": [{"url": "http://h"}],
                "paths": {"/": {"get": {"parameters": [{"$ref": "#/a"}]}}},
                "a": {"$ref": "#/a"},
            },
            "breaks its format",
        ),
        (
            {
                "openapi": "3.0.0",
                "servers": [{"url": "http://h"}],
                "paths": {"/": {"get": {"parameters": [{"$ref": "http://other/x"}]}}},
            },
            "breaks its format",
        ),
    ],
)
def test_a_wrong_document_names_the_problem(
    tmp_path: Path, document: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "api.yaml"
    path.write_text(repr(document))  # which YAML reads, too
    with pytest.raises(BadRequest, match=problem):
        list(operations("api", read_document(path), OpenApiSource(document=path)))
