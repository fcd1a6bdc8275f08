"""The TypeScript types of the console match the routes and the events of the service."""

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import pytest

from sbx.api.app import create_app
from sbx.api.server.settings import ServiceSettings
from sbx.protocol import agent

if TYPE_CHECKING:
    from sbx.service.service import Service

SOURCE = Path(__file__).resolve().parents[2] / "sbx" / "console" / "source"
SCHEMAS = {
    "Me": "Me",
    "Chat": "ChatBody",
    "Approval": "PendingBody",
    "Rule": "RuleBody",
    "Sandbox": "SandboxDetail",
    "Ended": "EndedSandboxBody",
    "Upload": "Upload",
    "FileEntry": "FileEntry",
    "Project": "ProjectBody",
    "QuarantineItem": "QuarantineItemBody",
    "QuarantineContent": "QuarantineContent",
    "Key": "KeyBody",
    "Token": "TokenBody",
    "Template": "TemplateBody",
    "Agent": "AgentBody",
    "Profile": "AgentProfile",
    "PolicyItem": "PolicyItem",
    "Login": "LoginBody",
}
_INTERFACE = re.compile(r"export interface (\w+)(?: extends \w+)? \{\n(.*?)\n\}", re.DOTALL)
_FIELD = re.compile(r"^  (\w+)(\?)?: (.+);$", re.MULTILINE)
_EVENT = re.compile(r"\| \{ type: \"(\w+)\";? ?(.*) \}$", re.MULTILINE)
# The kinds of JSON that a type of TypeScript allows; an alias or an object is anything.
_KINDS = {"string": "string", "number": "number", "boolean": "boolean", "null": "null"}


@cache
def _types() -> dict[str, dict[str, str]]:
    text = (SOURCE / "api" / "types.ts").read_text()
    return {
        name: {
            field: f"{kind} | null" if absent else kind
            for field, absent, kind in _FIELD.findall(body)
        }
        for name, body in _INTERFACE.findall(text)
    }


@cache
def _schemas() -> dict[str, Any]:
    # A Service would hide its paths from the errors of other tests in this process.
    document = create_app(cast("Service", None), ServiceSettings()).openapi()
    schemas: dict[str, Any] = document["components"]["schemas"]
    return schemas


def _kinds(schema: dict[str, Any]) -> Iterator[str]:
    for part in schema.get("anyOf", [schema]):
        kind = part.get("type", "object")
        yield "number" if kind == "integer" else kind


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_type_has_the_fields_of_its_body(name: str) -> None:
    properties = _schemas()[SCHEMAS[name]]["properties"]
    for field, text in _types()[name].items():
        assert field in properties, field
        # An optional field is absent where the value is null.
        kinds = {_KINDS.get(part.strip(), "object") for part in text.split("|")}
        if kinds <= set(_KINDS.values()):
            assert kinds == set(_kinds(properties[field])), field
        else:
            assert ("null" in kinds) == ("null" in _kinds(properties[field])), field


def test_every_type_of_the_routes_is_compared() -> None:
    assert {*_types()} - {*SCHEMAS} == {"Usage"}  # a dictionary in the schema


def test_the_events_of_a_run_are_those_of_the_service() -> None:
    text = (SOURCE / "types" / "agent.ts").read_text()
    shown = {
        name: {field.partition(":")[0].strip(" ?") for field in body.split(";") if field.strip()}
        for name, body in _EVENT.findall(text)
    }
    sent = {
        kind.__dataclass_fields__["type"].default: {field.name for field in fields(kind)} - {"type"}
        for kind in get_args(agent.AgentEvent)
    }
    # The service adds where the run is: api/agent_v1/chat.py.
    sent["run_start"] |= {"after_seq", "session_id", "sandbox_id", "project_id"}
    assert shown == sent
