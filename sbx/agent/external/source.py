"""A file that describes a source of tools: where they are, who may use them, and their limits."""

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    model_validator,
)

from sbx.agent.operator_files import OperatorFiles, OperatorTable
from sbx.agent.tools.arguments import check_schema
from sbx.agent.tools.registry import builtin, optional
from sbx.agent.tools.tool import Permission
from sbx.errors import BadRequest
from sbx.policy.checks import secret_source

NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_PARAMETER = re.compile(r"\{([^{}/?#]+)\}")
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]+")
RESERVED = frozenset(tool.name for tool in (*builtin(), *optional()))

Text = Annotated[str, StringConstraints(max_length=4000)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Words = Annotated[tuple[Word, ...], Field(max_length=500)]
_SecretName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
_Templates = Mapping[Word, Text]


def _is_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("must be an address such as https://host/path, without a user")
    if parts.fragment:
        raise ValueError("must not have a fragment (#)")
    return value


_Url = Annotated[str, StringConstraints(max_length=2000), AfterValidator(_is_url)]


def _is_schema(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if value.get("type") != "object":
        raise ValueError('must be a JSON Schema with type = "object"')
    check_schema(value)
    return value


class McpSource(OperatorTable):
    """A server of the Model Context Protocol: `command` is started and its standard streams are
    used, or the server at `url` is. `env` and `headers` may contain secrets as `${name}`. `tools`:
    which of its tools; None for all."""

    command: Annotated[tuple[Word, ...], Field(min_length=1, max_length=100)] | None = None
    url: _Url | None = None
    env: _Templates = Field(default_factory=dict)
    headers: _Templates = Field(default_factory=dict)
    tools: _Words | None = None

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("needs either command or url")
        return self


class HttpSource(OperatorTable):
    """One endpoint. `{name}` in the path of `url` is an argument. Other arguments are the query of
    a GET, HEAD or DELETE request, in addition to that of `url`, and the JSON body of others.
    `headers` may contain secrets as `${name}`."""

    url: _Url
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: _Templates = Field(default_factory=dict)
    parameters: Annotated[Mapping[str, Any], AfterValidator(_is_schema)] = Field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )

    @model_validator(mode="after")
    def _has_parameters(self) -> Self:
        path = urlsplit(self.url).path
        outside = set(_PARAMETER.findall(self.url.replace(path, "", 1) if path else self.url))
        if outside:
            raise ValueError(f"only the path of url may contain {{{min(outside)}}}")
        for name in _PARAMETER.findall(path):
            if name not in self.parameters.get("required", ()):
                raise ValueError(f"parameters must require {name}, which url contains")
        fixed = query_names(self.url) & self.parameters.get("properties", {}).keys()
        if fixed:
            raise ValueError(f"parameters has {min(fixed)}, which url sets already")
        return self


class OpenApiSource(OperatorTable):
    """The operations of an OpenAPI 3 document, a JSON or YAML file. `url`: the address of the
    service; None for that of the document. `operations`: which of them by `operationId`; None for
    all."""

    document: Annotated[Path, AfterValidator(lambda path: path.expanduser())]
    url: _Url | None = None
    headers: _Templates = Field(default_factory=dict)
    operations: _Words | None = None


class PythonSource(OperatorTable):
    """A function of a module that this host can import, or a Tool, or a sequence of both. It runs
    in the process of sbx, with all rights of its user."""

    function: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


class ToolSource(OperatorTable):
    """`agents` and `users`: the ids that may use the tools; None for all. `scope`: the scope that a
    token needs. `approval`: whether a person must approve a call. `timeout` in seconds and
    `result_max` in characters limit a call, and `calls_per_minute` those of each user. A failed
    call of an `idempotent` source may be repeated. `cache`: the seconds for which a result is used
    again for a call of the same user with the same arguments; 0 for never. `secrets`: names, and
    their places on this host: `env:NAME` or `file:/path`."""

    description: Text = ""
    agents: _Words | None = None
    owners: _Words | None = None
    users: _Words | None = None
    scope: Literal["execute", "files:read", "files:write"] = "execute"
    approval: Permission = "ask"
    timeout: Annotated[float, Field(gt=0, le=3600)] = 30.0
    calls_per_minute: Annotated[int, Field(ge=1, le=100_000)] = 60
    result_max: Annotated[int, Field(ge=100, le=4 << 20)] = 1 << 20
    idempotent: bool = False
    cache: Annotated[float, Field(ge=0, le=7 * 86_400)] = 0.0
    secrets: Annotated[
        Mapping[_SecretName, Annotated[str, AfterValidator(secret_source)]], Field(max_length=20)
    ] = Field(default_factory=dict)
    mcp: McpSource | None = None
    http: HttpSource | None = None
    openapi: OpenApiSource | None = None
    python: PythonSource | None = None

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        if sum(part is not None for part in (self.mcp, self.http, self.openapi, self.python)) != 1:
            raise ValueError("needs exactly one of the tables mcp, http, openapi and python")
        if self.cache and not self.idempotent:
            raise ValueError("cache needs idempotent = true: a call that changes something is made")
        for text in self._templates():
            template = Template(text)
            if not template.is_valid():
                raise ValueError("a header or variable has a $ that is neither $$ nor ${name}")
            if missing := set(template.get_identifiers()) - self.secrets.keys():
                raise ValueError(f"${{{min(missing)}}} is not in the table secrets")
        return self

    @property
    def kind(self) -> str:
        kinds = ("mcp", "http", "openapi", "python")
        return next(kind for kind in kinds if getattr(self, kind) is not None)

    def allows(self, owner: str | None, user_id: str | None, agent_id: str | None) -> bool:
        """Return whether a user of an owner may call these tools through an agent. Each owner
        chooses the ids of its users and agents, so only `owners` keeps other keys away."""
        return (
            (self.owners is None or owner in self.owners)
            and (self.agents is None or agent_id in self.agents)
            and (self.users is None or user_id in self.users)
        )

    def _templates(self) -> list[str]:
        parts = (self.mcp, self.http, self.openapi)
        tables = [part.headers for part in parts if part is not None]
        tables += [self.mcp.env] if self.mcp is not None else []
        return [text for table in tables for text in table.values()]


def filled(texts: _Templates, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the texts with the values of secrets in the place of their names."""
    return {name: Template(text).substitute(secrets) for name, text in texts.items()}


def tool_name(source: str, own: str) -> str:
    """Return the name of one of several tools of a source, in the form that providers accept."""
    return f"{source}_{_UNUSUAL.sub('_', own)}"[:64]


def path_parameters(url: str) -> list[str]:
    return _PARAMETER.findall(url)


def query_names(url: str) -> set[str]:
    """Return the names to which the query of an address gives a value."""
    return {name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)}


def check_name(name: str) -> str:
    """Raise BadRequest `invalid_tool`."""
    if not NAME.fullmatch(name) or name in RESERVED:
        raise BadRequest(
            f"{name[:80]!r} cannot be the name of a source of tools",
            code="invalid_tool",
            hint="take at most 32 lower-case letters, digits, '_' and '-', and no tool of sbx",
        )
    return name


_FILES = OperatorFiles(ToolSource, "tool source", "invalid_tool", "docs/tools.md")
parse_source = _FILES.parse
source_files = _FILES.list


def read_source(path: Path) -> ToolSource:
    """Return the source in a file. The document of an OpenAPI source lies in the same directory,
    unless its path is absolute. Raise BadRequest `invalid_tool`, also for a file that cannot be
    read."""
    check_name(path.stem)
    source = _FILES.read(path)
    if source.openapi is None:
        return source
    document = path.parent / source.openapi.document
    openapi = source.openapi.model_copy(update={"document": document})
    return source.model_copy(update={"openapi": openapi})
