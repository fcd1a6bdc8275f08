"""Parse the arguments that a model wrote, and check them against the schema of the tool. Pure."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from sbx.agent.tools.tool import Arguments, ToolDefinition
from sbx.errors import BadRequest, needs_extra

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError as Violation
    from jsonschema_rs import Validator

_LONG = 1 << 20  # characters
TEXT_MAX = 16 << 20  # characters of JSON
_DEPTH_MAX = 64  # so that they can be encoded again at any depth of the stack
_VALUES_MAX = 25_000  # of arguments whose errors are all collected, which takes 0.3 s
_SHOWN_MAX = 16 << 10  # characters of JSON; messages about longer arguments do not repeat values
_MASK = {"mask": "the value"}  # in messages, instead of a long value
_ERRORS_TOLD = 5
_TOLD_MAX = 300  # characters of one error
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_arguments(definition: ToolDefinition, text: str) -> Arguments:
    """Return the arguments, which fit the schema. Raise BadRequest `invalid_arguments` with a
    message for the model that names each field and its error."""
    arguments = _object(text)
    errors = _violations(definition, arguments, len(text))
    if not errors:
        return arguments
    schema = definition.parameters
    sentences = (sentence for error in errors for sentence in _sentences(error, schema))
    shown = list(islice(sentences, _ERRORS_TOLD + 1))
    if len(shown) > _ERRORS_TOLD:
        shown[_ERRORS_TOLD:] = ["and more"]
    field = _field(errors[0])
    raise BadRequest(
        f"wrong arguments: {'; '.join(shown)}",
        code="invalid_arguments",
        hint=f"{definition.name} takes {_taken(schema)}",
        details={"field": field},
    )


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return all known names, the nearest first."""
    close = difflib.get_close_matches(name[:100], names, n=len(names) or 1, cutoff=0.0)
    return [*close, *(candidate for candidate in names if candidate not in close)]


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if this is not a JSON Schema."""
    _validator(schema)


def _violations(definition: ToolDefinition, arguments: Arguments, size: int) -> "list[Violation]":
    """Return the errors, sorted by field; only the first one if the arguments have many values.
    Raise BadRequest `invalid_tool` if the schema itself is wrong."""
    mask = _MASK if size > _SHOWN_MAX else {}
    try:
        validator, unreachable = _validator(definition.parameters, **mask)
    except ValueError as error:
        raise _unchecked(definition, str(error).partition("\n")[0][:200]) from error
    if validator.is_valid(arguments):
        return []
    if _count(arguments) > _VALUES_MAX:
        errors = [_first(validator, arguments)]
    else:
        errors = [*validator.iter_errors(arguments)]
    if unreachable and any(error.kind.name == "falseSchema" for error in errors):
        raise _unchecked(definition, f"the schema refers to {unreachable[0]:.200}")
    return sorted(errors, key=lambda error: [str(part) for part in error.instance_path])


def _first(validator: "Validator", arguments: Arguments) -> "Violation":
    from jsonschema_rs import ValidationError

    try:
        validator.validate(arguments)
    except ValidationError as error:
        return error
    raise AssertionError("these arguments are valid")


def _validator(schema: Mapping[str, Any], **options: Any) -> "tuple[Validator, list[str]]":
    """Return the validator of a schema, and the URLs to which the schema refers. They are never
    fetched, and no value fits the schema there. A pattern is matched in linear time, so it has no
    lookaround and no backreference. Raise ValueError for an invalid schema."""
    with needs_extra("sbx.agent", "agent"):
        from jsonschema_rs import Draft202012Validator, RegexOptions

    unreachable: list[str] = []

    def retrieve(uri: str) -> bool:
        unreachable.append(uri)
        return False

    patterns = RegexOptions()
    validator = Draft202012Validator(
        dict(schema), retriever=retrieve, pattern_options=patterns, **options
    )
    return validator, unreachable


def _unchecked(definition: ToolDefinition, why: str) -> BadRequest:
    return BadRequest(
        f"these arguments cannot be checked: {why}",
        code="invalid_tool",
        hint=f"use another tool: the schema of {definition.name} is broken",
    )


def _decoded(text: str) -> Any:
    """Return the value of a JSON text. msgspec takes 15 ms for 16 MiB with many escapes, of which
    the standard library takes 50 ms, but it names no place of an error."""
    if len(text) > _LONG:
        with suppress(msgspec.DecodeError, ValueError):
            return msgspec.json.decode(text)
    return json.loads(text.strip() or "{}", parse_constant=_no_number, parse_float=_finite)


def _object(text: str) -> dict[str, Any]:
    if len(text) > TEXT_MAX:
        raise _bad(f"the arguments are longer than {TEXT_MAX} characters of JSON")
    try:
        value = _decoded(text)
        if _ESCAPED_SURROGATE.search(text):
            text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise _bad(
            "the arguments have half of a surrogate pair, which is not a character"
        ) from None
    except json.JSONDecodeError as error:
        raise _bad(f"the arguments are not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(f"the arguments are not valid JSON: {error}"[:_TOLD_MAX]) from None
    if not isinstance(value, dict):
        raise _bad(f"the arguments are {_kind(value)}, and must be a JSON object")
    if _is_deep(value):
        raise _bad(f"the arguments are nested more than {_DEPTH_MAX} deep")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a JSON number, or cannot be encoded again")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(_DEPTH_MAX):
        inner = (element.values() if isinstance(element, dict) else element for element in level)
        level = [element for many in inner for element in many if isinstance(element, dict | list)]
        if not level:
            return False
    return True


def _count(value: object) -> int:
    """Return the number of values in it."""
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def _sentences(error: "Violation", schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description of each error with its field. The message of the validator would repeat
    the value, which may be long and which the model already has."""
    values = error.kind.as_dict()
    match error.kind.name:
        case "required":
            yield f"'{_field(error)}' is missing"
        case "additionalProperties":
            names = list(_at(schema, error.schema_path[:-1]).get("properties", {}))
            for name in values["unexpected"]:
                order = ", ".join(nearest(name, names))
                field = _field(error, name)
                yield f"'{field}' is unknown, known are: {order}"[:_TOLD_MAX]
        case "type":
            kinds = " or ".join(values["types"])
            yield f"'{_field(error)}' must be of type {kinds}, and is {_kind(error.instance)}"
        case "enum":
            choices = ", ".join(json.dumps(choice) for choice in values["options"])
            yield f"'{_field(error)}' must be one of {choices}"[:_TOLD_MAX]
        case _:
            message = error.message
            if len(message) > _TOLD_MAX:
                message = f"{message[: _TOLD_MAX // 2]} … {message[-_TOLD_MAX // 2 :]}"
            yield f"'{_field(error)}': {message}"


def _at(schema: Mapping[str, Any], path: Sequence[str | int]) -> Mapping[str, Any]:
    """Return the part of a schema at this path, or an empty one: a `$id` may change the path."""
    value: Any = schema
    try:
        for part in path:
            value = value[part]
    except (LookupError, TypeError):
        return {}
    return value if isinstance(value, Mapping) else {}


def _field(error: "Violation", name: str | None = None) -> str:
    """Return the field of an error; of a missing or unknown property, that property."""
    parts = [str(part) for part in error.instance_path]
    if error.kind.name == "required":
        name = error.kind.as_dict()["property"]
    if name is not None:
        parts.append(name)
    return ".".join(parts)[:_TOLD_MAX] or "arguments"


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _taken(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    names = [
        name if name in required else f"{name} (optional)" for name in schema.get("properties", {})
    ]
    return ", ".join(names) or "no arguments"


def _bad(sentence: str) -> BadRequest:
    return BadRequest(
        sentence,
        code="invalid_arguments",
        hint="call the tool again with one JSON object",
        details={"field": "arguments"},
    )
