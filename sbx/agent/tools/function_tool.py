"""`@tool`: make a tool from a Python function of the user.

    @tool
    async def weather(city: Annotated[str, Field(description="its English name")]) -> str:
        \"\"\"The weather in a city, now.\"\"\"

The docstring is the description. pydantic derives the schema from names, annotations and defaults,
and converts the arguments to the annotated types. A first parameter with the annotation
`ToolCallRequest` receives the call itself, with its sandbox. A function that is not async runs in a
thread. The thread continues to its end if the call is cancelled.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic_core import to_json

from sbx.agent.tools.arguments import check_schema
from sbx.agent.tools.tool import (
    Arguments,
    Effect,
    Permission,
    Tool,
    ToolCallRequest,
    ToolDefinition,
    ToolResult,
)
from sbx.errors import BadRequest

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the format that every provider accepts
Act = Callable[[ToolCallRequest, Arguments], Awaitable[ToolResult | str]]


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    permission: Permission | None = None,
    effect: Effect = "code",
    idempotent: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    permission: Permission | None = None,
    effect: Effect = "code",
    idempotent: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a Tool from a function. With `parameters`, a JSON Schema of an object, the function
    receives the arguments unconverted. `effect` is the effect of its calls. A call of an
    `idempotent` tool may be repeated.

    Raise BadRequest `invalid_tool`.
    """

    def make(function: Callable[..., Any]) -> Tool:
        own_name = name or str(getattr(function, "__name__", ""))
        if not _NAME.fullmatch(own_name):
            raise _invalid(own_name, "its name must be 1 to 64 letters, digits, '_' and '-'")
        text = description or inspect.getdoc(function) or ""
        if not text:
            raise _invalid(own_name, "it has no description: give its function a docstring")
        passes_call, model = _parameters(own_name, function, derive=parameters is None)
        schema = parameters if parameters is not None else _schema(own_name, model)
        _check_schema(own_name, schema)
        return Tool(
            definition=ToolDefinition(own_name, text, schema),
            act=_acting(function, passes_call, model),
            effect=lambda _arguments: effect,
            permission=permission,
            idempotent=idempotent,
        )

    return make if function is None else make(function)


def _parameters(
    name: str, function: Callable[..., Any], *, derive: bool
) -> tuple[bool, type[BaseModel] | None]:
    """Return whether the function takes the call first. If the schema is derived, also return a
    model of its other parameters."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise _invalid(name, f"its annotations cannot be read: {error}") from error
    parameters = list(inspect.signature(function).parameters.values())
    passes_call = bool(parameters) and hints.get(parameters[0].name) is ToolCallRequest
    if not derive:
        return passes_call, None
    fields: dict[str, Any] = {}
    for parameter in parameters[1:] if passes_call else parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _invalid(name, f"its parameter {parameter.name} cannot be passed by name")
        if parameter.name not in hints:
            raise _invalid(name, f"its parameter {parameter.name} has no annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Use our own names for the fields: pydantic reserves some names.
        field = Field(default, alias=parameter.name)
        fields[f"field_{len(fields)}"] = (hints[parameter.name], field)
    try:
        return passes_call, create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        raise _invalid(name, f"no schema can be made of its annotations: {error}") from error


def _schema(name: str, model: type[BaseModel] | None) -> dict[str, Any]:
    assert model is not None
    try:
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise _invalid(name, f"no schema can be made of its annotations: {error}") from error
    for titled in (schema, *schema.get("properties", {}).values()):
        titled.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    try:
        check_schema(schema)
    except ValueError as error:
        why = str(error).partition("\n")[0][:300]
        raise _invalid(name, f"its parameters are not a JSON Schema: {why}") from error
    if schema.get("type") != "object":
        raise _invalid(name, 'its parameters must have {"type": "object"}')


def _acting(function: Callable[..., Any], passes_call: bool, model: type[BaseModel] | None) -> Act:
    async def act(call: ToolCallRequest, arguments: Arguments) -> ToolResult | str:
        values = dict(arguments) if model is None else _as_annotated(model, arguments)
        first = (call,) if passes_call else ()
        if inspect.iscoroutinefunction(function):
            value = await function(*first, **values)
        else:
            value = await asyncio.to_thread(function, *first, **values)
            if inspect.isawaitable(value):  # from a callable object, or a partial
                value = await value
        return _as_result(value)

    return act


def _as_annotated(model: type[BaseModel], arguments: Arguments) -> dict[str, Any]:
    """Return only the passed arguments, so that the defaults of the function apply. Raise
    BadRequest."""
    try:
        validated = model.model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "arguments"
        raise BadRequest(
            f"'{field:.200}': {first['msg']}", code="invalid_arguments", details={"field": field}
        ) from None
    names = {key: str(field.alias) for key, field in model.model_fields.items()}
    return {names[key]: getattr(validated, key) for key in validated.model_fields_set}


def _as_result(value: Any) -> ToolResult | str:
    if isinstance(value, ToolResult | str):
        return value
    return "done" if value is None else to_json(value, indent=2, fallback=str).decode()


def _invalid(name: str, reason: str) -> BadRequest:
    return BadRequest(f"{name!r:.80} cannot be a tool: {reason}", code="invalid_tool")
