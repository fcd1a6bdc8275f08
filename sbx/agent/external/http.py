"""Tools that are requests to an HTTP server: one endpoint, or operations of an OpenAPI document.

read_document ─► operations ─┐
              an endpoint ───┴► Operation ─► request_for ─► HttpTools.call
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import quote, urlencode, urlsplit

from msgspec import Struct, field

from sbx.agent.external.source import (
    HttpSource,
    OpenApiSource,
    path_parameters,
    query_names,
    tool_name,
)
from sbx.agent.models.sdk_model import bounded_client
from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolDefinition, ToolResult
from sbx.errors import BadRequest, Unavailable, needs_extra

if TYPE_CHECKING:
    import httpx2

ANSWER_MAX = 8 << 20  # bytes
_DOCUMENT_MAX = 8 << 20
_NODES_MAX = 500_000
_OPERATIONS_MAX = 200
_DESCRIPTION_MAX = 2000
_DEPTH_MAX = 64
_METHODS = ("get", "put", "post", "delete", "head", "patch")
_BODYLESS = ("GET", "HEAD", "DELETE")
_SCHEMAS = "#/components/schemas/"
# Headers that decide where a request goes, or with which rights.
_FIXED_HEADERS = frozenset({"authorization", "cookie", "host", "content-length", "connection"})
Place = Literal["path", "query", "header", "body"]


class AnswerTooLong(Exception):
    """An answer of more than the limit, or a compressed one."""


class Operation(Struct, frozen=True):
    """One request. `places`: where each argument goes; `body` is the whole JSON body."""

    definition: ToolDefinition
    method: str
    url: str
    places: Mapping[str, Place] = field(default_factory=dict)

    def place_of(self, argument: str) -> Place | Literal["fields"]:
        """Return the place of an argument. `fields` are the fields of a JSON body."""
        if argument in path_parameters(self.url):
            return "path"
        return self.places.get(argument, "query" if self.method in _BODYLESS else "fields")


def endpoint(name: str, source: HttpSource, description: str) -> Operation:
    text = description or f"{source.method} {source.url}"
    return Operation(ToolDefinition(name, text, dict(source.parameters)), source.method, source.url)


# -- requests -------------------------------------------------------------------------------------


def request_for(operation: Operation, arguments: Arguments) -> dict[str, Any]:
    """Return the request for a call: `method`, `url`, `headers`, `json`. Raise BadRequest
    `invalid_arguments` for a value that would change the path, and for a name of the query that the
    operator has set."""
    path: dict[str, str] = {}
    parts: dict[str, Any] = {"query": {}, "headers": {}, "fields": {}}
    fixed = query_names(operation.url)
    body = None
    for name, value in arguments.items():
        match operation.place_of(name):
            case "path":
                path[name] = _segment(name, value)
            case "query" if name in fixed:
                raise _bad(name, "has a value that the operator of this tool has set")
            case "query":
                parts["query"][name] = _query(value)
            case "header":
                parts["headers"][name] = _header(name, value)
            case "body":
                body = value
            case "fields":
                parts["fields"][name] = value
    url = operation.url
    for name in path_parameters(url):
        url = url.replace(f"{{{name}}}", path[name])
    if parts["query"]:
        url += "&" if "?" in url else "?"
        url += urlencode(parts["query"], doseq=True, quote_via=quote)
    request = {"method": operation.method, "url": url}
    if parts["headers"]:
        request["headers"] = parts["headers"]
    if body is not None or parts["fields"] or operation.method not in _BODYLESS:
        request["json"] = parts["fields"] if body is None else body
    return request


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _segment(name: str, value: Any) -> str:
    text = _plain(value)
    if text in ("", ".", ".."):
        raise _bad(name, "is not a segment of a path")
    return quote(text, safe="")


def _query(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list) else _plain(value)


def _header(name: str, value: Any) -> str:
    text = _plain(value)
    if not text.isascii() or not text.isprintable():
        raise _bad(name, "is not a line of ASCII")
    return text


def _bad(name: str, problem: str) -> BadRequest:
    return BadRequest(
        f"'{name:.80}' {problem}", code="invalid_arguments", details={"field": name[:80]}
    )


# -- OpenAPI --------------------------------------------------------------------------------------


def read_document(path: Path) -> Mapping[str, Any]:
    """Return an OpenAPI document. Raise BadRequest `invalid_tool`."""
    with needs_extra("an OpenAPI source", "agent"):
        import yaml
    try:
        with path.open("rb") as file:
            data = file.read(_DOCUMENT_MAX + 1)
        if len(data) > _DOCUMENT_MAX:
            raise _invalid(path, f"it is larger than {_DOCUMENT_MAX >> 20} MiB")
        is_json = path.suffix == ".json"
        if not is_json:
            _check_yaml(path, yaml.parse(data, yaml.CSafeLoader))
        document = json.loads(data) if is_json else yaml.load(data, yaml.CSafeLoader)
    except OSError as error:
        raise _invalid(path, f"it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise _invalid(path, str(error).partition("\n")[0][:300]) from None
    version = document.get("openapi") if isinstance(document, dict) else None
    if not str(version).startswith("3."):
        raise _invalid(path, "it is not a document of OpenAPI 3")
    return cast("Mapping[str, Any]", document)


def _check_yaml(path: Path, events: Iterator[Any]) -> None:
    """Refuse aliases: 400 bytes of aliases of aliases are ten million nodes for all code that walks
    them. Refuse also more nodes than a description of 200 operations needs."""
    for number, event in enumerate(events):
        if type(event).__name__ == "AliasEvent":
            raise _invalid(path, "it has aliases (*name): write the parts out, or use $ref")
        if number > _NODES_MAX:
            raise _invalid(path, f"it has more than {_NODES_MAX} nodes")


def read_operations(prefix: str, source: OpenApiSource) -> list[Operation]:
    """Return the operations of the document of a source. A large document takes seconds: call this
    in a thread. Raise as `read_document` and `operations`."""
    return list(operations(prefix, read_document(source.document), source))


def operations(
    prefix: str, document: Mapping[str, Any], source: OpenApiSource
) -> Iterator[Operation]:
    """Yield the operations of a document, as tools whose names begin with `prefix`. Raise
    BadRequest `invalid_tool` for an operation that the source names and the document has not, and
    for a document that breaks its own format."""
    path = source.document
    try:
        root = (source.url or _server(document["servers"][0])).rstrip("/")
        parts = urlsplit(root)
        if parts.scheme not in ("http", "https") or parts.query or path_parameters(root):
            raise _invalid(path, "its server has no plain address: name one with url")
        available = dict(_operations(document))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error!s:.200}"
        raise _invalid(path, f"it breaks its format, or lacks a server ({problem})") from None
    chosen = source.operations if source.operations is not None else tuple(available)
    if len(chosen) > _OPERATIONS_MAX:
        problem = f"it has {len(chosen)} operations: choose {_OPERATIONS_MAX} with operations"
        raise _invalid(path, problem)
    for name in chosen:
        if name not in available:
            raise _invalid(path, f"it has no operation {name}")
        method, template, text, schema, places = available[name]
        definition = ToolDefinition(tool_name(prefix, name), text[:_DESCRIPTION_MAX], schema)
        yield Operation(definition, method.upper(), root + template, places)


def _server(server: Mapping[str, Any]) -> str:
    """Return the address of a server, each variable with its default."""
    url = str(server["url"])
    for name in path_parameters(url):
        url = url.replace(f"{{{name}}}", str(server["variables"][name]["default"]))
    return url


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    schemas = document.get("components", {}).get("schemas", {})
    for template, item in document["paths"].items():
        for method in _METHODS:
            if method not in item:
                continue
            operation = item[method]
            name = operation.get("operationId") or f"{method}{template}"
            parameters = [*item.get("parameters", ()), *operation.get("parameters", ())]
            # A parameter of the path that the document forgets to describe is a text.
            inside = path_parameters(template)
            properties: dict[str, Any] = {name: {"type": "string"} for name in inside}
            places: dict[str, Any] = dict.fromkeys(inside, "path")
            required = list(inside)
            for reference in parameters:
                parameter = _resolve(document, reference)
                place, label = parameter["in"], parameter["name"]
                if place == "cookie" or label.lower() in _FIXED_HEADERS:
                    continue
                if (place == "path") != (label in inside):
                    if parameter.get("required") and place != "path":
                        raise LookupError(f"{label} is in the path and in the {place}")
                    continue
                schema = dict(parameter.get("schema") or {"type": "string"})
                if "description" in parameter:
                    schema["description"] = parameter["description"]
                properties[label], places[label] = schema, place
                if parameter.get("required") and label not in required:
                    required.append(label)
            if (body := _resolve(document, operation.get("requestBody"))) is not None:
                content = body["content"]
                media = content.get("application/json")
                if media is None:
                    continue  # forms and files
                properties["body"], places["body"] = media.get("schema", {}), "body"
                if body.get("required"):
                    required.append("body")
            schema = {"type": "object", "properties": properties, "required": required}
            schema["additionalProperties"] = False
            text = operation.get("description") or operation.get("summary") or name
            yield name, (method, template, str(text), _closed(schema, schemas), places)


def _resolve(document: Mapping[str, Any], value: Any) -> Any:
    """Follow a reference within the document."""
    for _ in range(_DEPTH_MAX):
        if not isinstance(value, Mapping) or "$ref" not in value:
            return value
        pointer, value = value["$ref"], document
        if not pointer.startswith("#/"):
            raise LookupError(pointer)
        for part in pointer[2:].split("/"):
            value = value[part.replace("~1", "/").replace("~0", "~")]
    raise RecursionError(pointer)


def _closed(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the schemas that it refers to as its `$defs`."""
    used: dict[str, Any] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith(_SCHEMAS):
            name = reference.removeprefix(_SCHEMAS)
            if name not in used:
                used[name] = None  # a schema may refer to itself
                used[name] = visit(schemas[name])
            return {**value, "$ref": f"#/$defs/{name}"}
        return {key: visit(each) for key, each in value.items()}

    whole = visit(schema)
    return {**whole, "$defs": used} if used else whole


def _invalid(path: Path, problem: str) -> BadRequest:
    return BadRequest(f"{path.name} cannot be used: {problem}", code="invalid_tool")


# -- calls ----------------------------------------------------------------------------------------


class HttpTools:
    """The client of one source, and its tools. `headers` are those of the operator, with their
    secrets; arguments never replace them."""

    def __init__(self, headers: Mapping[str, str], timeout_s: float) -> None:
        with needs_extra("tools over HTTP", "agent"):
            self._client = bounded_client(timeout_s, AnswerTooLong, ANSWER_MAX)
        self._headers = dict(headers)
        self._fixed = {name.lower() for name in headers}

    def tool(self, operation: Operation) -> Tool:
        return Tool(operation.definition, self._act(operation), effect=lambda _: "read")

    def _act(self, operation: Operation) -> Callable[[ToolCallRequest, Arguments], Any]:
        async def act(_: ToolCallRequest, arguments: Arguments) -> ToolResult:
            return await self._call(request_for(operation, arguments))

        return act

    async def _call(self, request: dict[str, Any]) -> ToolResult:
        import httpx2

        chosen = request.get("headers", {}).items()
        allowed = {name: value for name, value in chosen if name.lower() not in self._fixed}
        request["headers"] = allowed | self._headers
        try:
            response = await self._client.request(**request)
        except AnswerTooLong as error:
            raise Unavailable(f"the answer cannot be used: {error}", code="tool_failed") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            problem = f"{type(error).__name__}: {error!s:.300}"
            raise Unavailable(f"the request failed: {problem}", code="tool_unavailable") from None
        return _result(response)

    async def close(self) -> None:
        await self._client.aclose()


def _result(response: "httpx2.Response") -> ToolResult:
    try:
        text = response.content.decode(response.charset_encoding or "utf-8")
    except (UnicodeDecodeError, LookupError):
        size = len(response.content)
        return ToolResult(f"the answer has {size} bytes that are not text", is_error=True)
    if response.is_success:
        return ToolResult(text or f"HTTP {response.status_code}, without a text")
    return ToolResult(f"HTTP {response.status_code}: {text}", is_error=True)
