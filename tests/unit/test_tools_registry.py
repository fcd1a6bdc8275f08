"""Tools by name: what a model wrote wrongly comes back in words, and nothing is raised."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from typing import Annotated, Any

import pytest
from msgspec.structs import replace
from pydantic import BaseModel, Field

from sbx.agent.messages import ToolCall
from sbx.agent.tools.function_tool import tool
from sbx.agent.tools.registry import Tools, builtin
from sbx.agent.tools.schema_formats import DIALECTS
from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolResult
from sbx.errors import BadRequest, Conflict, Denied, NotFound, Unavailable
from tests.unit.fake_toolbox import FakeToolbox, called, ended


class Place(BaseModel):
    city: str
    zone: int = 0


@tool
def weather(
    place: Place,
    days: Annotated[int, Field(ge=1, le=9, description="how many")] = 1,
    schema: str = "",
) -> dict[str, Any]:
    """The weather somewhere."""
    return {"city": place.city, "days": days, "thread": threading.current_thread().name}


@tool(name="where-am-i", permission="ask", effect="read")
async def where(call: ToolCallRequest) -> str:
    """Which call this is."""
    return call.id


@tool(name="open", parameters={"type": "object"})
def takes_anything(**given: Any) -> None:
    """Whatever."""


TOOLS = Tools([*builtin(), weather, where, takes_anything])


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("run_cod", "{}", "there are: run_code, "),
        ("x" * 1000, "{}", "does not exist"),
        ("\ud800", "{}", "does not exist"),
        ("run_code", "", "'code' is missing"),
        ("run_code", "{", "are not JSON"),
        ("run_code", "[]", "are an array, and must be a JSON object"),
        ("run_code", "[" * 100_000, "not valid JSON"),
        ("run_code", '{"code": NaN}', "NaN is not a JSON number"),
        ("run_code", f'{{"code": {"9" * 5000}}}', "not valid JSON"),
        ("execute_command", '{"command": "x", "timeout": 1e999}', "1e999 is not a JSON number"),
        ("open", f'{{"a": {"[" * 70 + "]" * 70}}}', "more than 64 deep"),
        ("run_code", json.dumps({str(n): 1 for n in range(20_000)}), "and more"),
        ("run_code", '{"code": 1}', "'code' must be of type string, and is a number"),
        ("run_code", '{"code": "1", "cod": 1}', "'cod' is unknown, known are: code, language"),
        ("run_code", '{"code": "1", "language": "rust"}', "'language' must be one of"),
        ("run_code", '{"code": "\\ud800"}', "half of a surrogate pair"),
        ("execute_command", '{"command": "x", "timeout": 0}', "'timeout': 0 is less"),
        ("execute_command", '{"command": ""}', "'command'"),
        ("read_file", '{"path": "x", "offset": 0}', "'offset': 0 is less"),
        ("weather", '{"place": {"city": 5}}', "'place.city' must be of type string"),
        ("weather", '{"place": {}, "days": 10}', "'days': 10 is greater"),
        ("weather", '{"place": {}, "days": 10}', "'place.city' is missing"),
    ],
)
async def test_a_bad_call_is_a_result_that_names_what_is_wrong(
    name: str, arguments: str, said: str
) -> None:
    box = FakeToolbox(*ended())
    result = await called(TOOLS, name, arguments, box)
    assert result.is_error
    assert said in result.text
    assert len(result.text) < 2000
    result.text.encode()
    assert not box.asked, "and nothing was run"


def test_parse_gives_the_arguments_or_the_error() -> None:
    call = ToolCall("1", "run_code", '{"code": "1"}')
    assert TOOLS.parse(call) == {"code": "1"}
    assert isinstance(TOOLS.parse(replace(call, arguments="{}")), ToolResult)


def test_tools_do_not_import_jsonschema() -> None:
    """Its optional parsers take 2 s of CPU where Jupyter is installed."""
    script = (
        "import sys; from sbx.agent.messages import ToolCall; "
        "from sbx.agent.tools.registry import Tools; "
        "Tools().parse(ToolCall('1', 'run_code', '{}')); print('jsonschema' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"


def test_an_unknown_tool_is_named_with_the_nearest_first() -> None:
    with pytest.raises(NotFound) as caught:
        TOOLS.get("readfile")
    assert caught.value.code == "tool_not_found"
    assert caught.value.details["available"][0] == "read_file"


def test_two_tools_have_no_name_in_common() -> None:
    with pytest.raises(Conflict):
        Tools([weather, weather])


# -- @tool -----------------------------------------------------------------------------------------


def test_a_schema_comes_from_the_signature() -> None:
    schema = weather.definition.parameters
    assert weather.definition.description == "The weather somewhere."
    assert schema["required"] == ["place"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["days"]["description"] == "how many"
    assert list(schema["properties"]) == ["place", "days", "schema"]
    assert where.definition.parameters["properties"] == {}
    assert (where.name, where.permission, where.effect({})) == ("where-am-i", "ask", "read")


async def test_a_function_gets_what_it_was_annotated_with_off_the_loop() -> None:
    result = await called(TOOLS, "weather", '{"place": {"city": "Bonn", "zone": 2}}')
    answer = json.loads(result.text)
    assert (answer["city"], answer["days"]) == ("Bonn", 1)
    assert answer["thread"] != threading.current_thread().name
    assert (await called(TOOLS, "where-am-i")).text == "call-1"


async def test_arguments_that_only_pydantic_refuses_are_an_error_that_names_the_field() -> None:
    @tool
    def even(number: Annotated[str, Field(pattern="^[0-9]+$")], when: "Place") -> None:
        """…"""

    result = await called(Tools([even]), "even", '{"number": "a", "when": {"city": ""}}')
    assert result.is_error
    assert "'number'" in result.text


async def test_a_schema_of_ones_own_gives_the_arguments_as_they_are() -> None:
    @tool(parameters={"type": "object", "properties": {"n": {"$ref": "https://example.org/x"}}})
    def raw(**given: Any) -> object:
        """…"""
        return given

    assert json.loads((await called(Tools([raw]), "raw", '{"a": [1]}')).text) == {"a": [1]}
    result = await called(Tools([raw]), "raw", '{"n": 1}')
    assert "cannot be checked: the schema refers to https://example.org/x" in result.text
    assert result.is_error, "no schema is fetched"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tool(lambda x: x), "letters, digits"),
        (lambda: tool(name="a")(_undocumented), "no description"),
        (lambda: tool(name="a", description="d")(_bare), "no annotation"),
        (lambda: tool(name="a", description="d")(_starred), "by name"),
        (lambda: tool(name="a", description="d")(_odd), "no schema"),
        (lambda: tool(name="a", description="d", parameters={"type": "x"})(_bare), "JSON Schema"),
        (lambda: tool(name="a", description="d", parameters={})(_bare), "object"),
    ],
)
def test_what_cannot_be_a_tool_says_why(make: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        make()
    assert caught.value.code == "invalid_tool"


def _undocumented(x: int) -> None: ...


def _bare(x):  # type: ignore[no-untyped-def]
    return x


def _starred(*x: int) -> None: ...


def _odd(x: threading.Lock) -> None: ...


# -- what comes of a call --------------------------------------------------------------------------


def acting(act: Any) -> Tools:
    return Tools([Tool(weather.definition, act, lambda _: "read")], result_max=400, call_max_s=0.05)


ANYWHERE = '{"place": {"city": ""}}'


async def test_errors_of_a_tool_are_results() -> None:
    async def refused(call: ToolCallRequest, arguments: Arguments) -> str:
        raise Denied("the policy says no", code="denied_so", hint="ask for less")

    async def broken(call: ToolCallRequest, arguments: Arguments) -> str:
        raise ZeroDivisionError("x" * 5000)

    async def endless(call: ToolCallRequest, arguments: Arguments) -> str:
        await asyncio.Event().wait()
        return ""

    async def impatient(call: ToolCallRequest, arguments: Arguments) -> str:
        raise TimeoutError("its own")

    answer = [await called(acting(act), "weather", ANYWHERE) for act in (refused, broken, endless)]
    assert all(result.is_error for result in answer)
    assert answer[0].text == "Error (denied_so): the policy says no\nHint: ask for less"
    assert "ZeroDivisionError: xxx" in answer[1].text
    assert "took longer than 0.05 s" in answer[2].text
    assert "TimeoutError: its own" in (await called(acting(impatient), "weather", ANYWHERE)).text


async def test_a_long_result_is_cut_in_the_middle_and_kept_whole() -> None:
    whole = "".join(f"line {n}\n" for n in range(1000)) + "\ud800"

    async def long(call: ToolCallRequest, arguments: Arguments) -> str:
        return whole + "\0"

    box = FakeToolbox()
    result = await called(acting(long), "weather", ANYWHERE, box)
    (path,) = box.files.content
    assert path.startswith("/workspace/uploads/generated/weather-")
    assert path in result.text
    assert box.files.content[path].decode() == whole.replace("\ud800", "?\\x00")
    head, _, tail = result.text.partition("[…")
    assert head.startswith("line 0\n")
    assert head.endswith("\n\n")
    assert tail.endswith("line 999\n?\\x00")
    cut = int(tail.split()[0])
    assert len(head.rstrip("\n")) + 1 + cut + len(tail.partition("…]\n\n")[2]) == len(whole) + 4
    assert len(result.text) < 600


async def test_a_sandbox_with_a_place_for_results_is_asked_to_save_them() -> None:
    class Saving(FakeToolbox):
        async def save_result(self, name: str, content: bytes, /) -> str:
            return f"/beside/{len(content)}"

    async def long(call: ToolCallRequest, arguments: Arguments) -> str:
        return "x" * 1000

    box = Saving()
    result = await called(acting(long), "weather", ANYWHERE, box)
    assert "/beside/1000" in result.text
    assert not box.files.content


async def test_a_long_result_that_cannot_be_kept_is_cut_all_the_same() -> None:
    class Full(FakeToolbox):
        async def save_result(self, name: str, content: bytes, /) -> str:
            raise Unavailable("there is no space left")

    async def long(call: ToolCallRequest, arguments: Arguments) -> str:
        return "x" * 1000

    result = await called(acting(long), "weather", ANYWHERE, Full())
    assert "no space left" in result.text
    assert not result.is_error


# -- dialects --------------------------------------------------------------------------------------


def test_definitions_in_three_dialects() -> None:
    (definition,) = Tools([where]).definitions()
    schema = dict(definition.parameters)
    named = {"name": "where-am-i", "description": "Which call this is."}
    assert {name: write([definition]) for name, write in DIALECTS.items()} == {
        "openai": [{"type": "function", "function": {**named, "parameters": schema}}],
        "anthropic": [{**named, "input_schema": schema}],
        "mcp": [{**named, "inputSchema": schema}],
    }


# -- hostile arguments and schemas -----------------------------------------------------------------


def schema_tool(**properties: Any) -> Tools:
    @tool(name="t", parameters={"type": "object", "properties": properties})
    def act(**_: Any) -> None:
        """Do nothing."""

    return Tools([act])


async def test_a_million_errors_take_no_longer_than_one() -> None:
    """All errors of such arguments took 24 s."""
    tools = schema_tool(a={"items": {"type": "string"}})
    started_at = time.process_time()
    result = await called(tools, "t", json.dumps({"a": [0] * 1_000_000}))
    assert "'a.0' must be of type string" in result.text
    assert time.process_time() - started_at < 10


async def test_a_pattern_is_matched_in_linear_time() -> None:
    tools = schema_tool(a={"pattern": "^(a+)+$"})
    started_at = time.process_time()
    assert (await called(tools, "t", json.dumps({"a": "a" * 1_000_000 + "!"}))).is_error
    assert time.process_time() - started_at < 10
    with pytest.raises(BadRequest, match="is not a") as caught:
        schema_tool(a={"pattern": "^(?=(a+)+c)"})
    assert caught.value.code == "invalid_tool"


async def test_an_error_in_a_referenced_schema_names_its_field() -> None:
    place = {"properties": {"city": {}}, "additionalProperties": False}
    tools = schema_tool(p={"$ref": "#/properties/q"}, q=place)
    result = await called(tools, "t", '{"p": {"cty": 1}}')
    assert "'p.cty' is unknown, known are: city" in result.text
