"""Parse the arguments that a model wrote, and check them against the schema of the tool. Pure."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from sbx.agent.tools.tool import Arguments, ToolDefinition
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

TEXT_MAX = 16 << 20  # characters of JSON
_DEPTH_MAX = 64  # so that they can be encoded again at any depth of the stack
_ERRORS_MAX = 50  # the limit of errors to collect; a model can cause a million
_ERRORS_TOLD = 5
_TOLD_MAX = 300  # characters of one error
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_arguments(definition: ToolDefinition, text: str) -> Arguments:
    """Return the arguments, which fit the schema. Raise BadRequest `invalid_arguments` with a
    message for the model that names each field and its error."""
    arguments = _object(text)
    errors = _violations(definition, arguments)
    if not errors:
        return arguments
    sentences = (sentence for error in errors for sentence in _sentences(error))
    shown = list(islice(sentences, _ERRORS_TOLD + 1))
    if len(shown) > _ERRORS_TOLD:
        shown[_ERRORS_TOLD:] = ["and more"]
    field = _field(errors[0])
    raise BadRequest(
        f"wrong arguments: {'; '.join(shown)}",
        code="invalid_arguments",
        hint=f"{definition.name} takes {_taken(definition.parameters)}",
        details={"field": field},
    )


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return all known names, the nearest first."""
    close = difflib.get_close_matches(name[:100], known, n=len(known) or 1, cutoff=0.0)
    return [*close, *(candidate for candidate in known if candidate not in close)]


def _violations(definition: ToolDefinition, arguments: Arguments) -> "list[ValidationError]":
    """Return the errors, sorted by field. Raise BadRequest `invalid_tool` if the schema itself is
    wrong."""
    from jsonschema import Draft202012Validator  # here: see `Tools.ready`
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    no_remote: Registry[Any] = Registry()  # a `$ref` to a URL is never fetched
    validator = Draft202012Validator(definition.parameters, registry=no_remote)
    try:
        errors = list(islice(validator.iter_errors(arguments), _ERRORS_MAX))
    except (Unresolvable, RecursionError, re.error) as error:
        raise BadRequest(
            f"these arguments cannot be checked: {error!s:.200}",
            code="invalid_tool",
            hint=f"use another tool: the schema of {definition.name} is broken",
        ) from error
    return sorted(errors, key=lambda error: [str(part) for part in error.absolute_path])


def _object(text: str) -> dict[str, Any]:
    if len(text) > TEXT_MAX:
        raise _bad(f"the arguments are longer than {TEXT_MAX} characters of JSON")
    try:
        value = json.loads(text.strip() or "{}", parse_constant=_no_number, parse_float=_finite)
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


def _sentences(error: "ValidationError") -> Iterator[str]:
    """Yield a description of each error with its field. The message of jsonschema would repeat the
    value, which may be long and which the model already has."""
    match error.validator:
        case "required":
            for name in error.validator_value:
                if name not in error.instance:
                    yield f"'{_field(error, name)}' is missing"
        case "additionalProperties" if error.validator_value is False:
            known = list(error.schema.get("properties", {}))
            for name in error.instance:
                if name not in known:
                    order = ", ".join(nearest(name, known))
                    field = _field(error, name)
                    yield f"'{field}' is unknown, known are: {order}"[:_TOLD_MAX]
        case "type":
            types = error.validator_value
            kinds = types if isinstance(types, str) else " or ".join(types)
            yield f"'{_field(error)}' must be of type {kinds}, and is {_kind(error.instance)}"
        case "enum":
            choices = ", ".join(json.dumps(choice) for choice in error.validator_value)
            yield f"'{_field(error)}' must be one of {choices}"[:_TOLD_MAX]
        case _:
            message = error.message
            if len(message) > _TOLD_MAX:
                message = f"{message[: _TOLD_MAX // 2]} … {message[-_TOLD_MAX // 2 :]}"
            yield f"'{_field(error)}': {message}"


def _field(error: "ValidationError", name: str | None = None) -> str:
    parts = [str(part) for part in error.absolute_path]
    if name is not None:
        parts.append(name)
    elif not parts and error.validator == "required":
        parts = [next(name for name in error.validator_value if name not in error.instance)]
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
