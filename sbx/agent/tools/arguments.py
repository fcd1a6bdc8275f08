"""Arguments as a model wrote them: JSON or not, fitting a tool's schema or not. Pure."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from referencing import Registry
from referencing.exceptions import Unresolvable

from sbx.agent.tools.tool import Arguments, ToolDefinition
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

TEXT_MAX = 16 << 20  # characters of JSON
_DEPTH_MAX = 64  # whoever writes them down again, at any depth of the stack, can do so
_ERRORS_MAX = 50  # found; a model can make a million
_ERRORS_TOLD = 5
_TOLD_MAX = 300  # characters, of one error
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NOTHING_ELSEWHERE: Registry[Any] = Registry()  # a `$ref` to an address is never fetched


def parse_arguments(definition: ToolDefinition, text: str) -> Arguments:
    """The arguments, which fit the schema. Raises BadRequest `invalid_arguments`: a sentence for
    the model, that names the field and what is wrong with it."""
    given = _object(text)
    wrong = _violations(definition, given)
    if not wrong:
        return given
    sentences = (sentence for error in wrong for sentence in _sentences(error))
    told = list(islice(sentences, _ERRORS_TOLD + 1))
    if len(told) > _ERRORS_TOLD:
        told[_ERRORS_TOLD:] = ["and there is more"]
    field = _field(wrong[0])
    raise BadRequest(
        f"wrong arguments: {'; '.join(told)}",
        code="invalid_arguments",
        hint=f"{definition.name} takes {_taken(definition.parameters)}",
        details={"field": field},
    )


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """All that are known, the nearest first."""
    close = difflib.get_close_matches(name[:100], known, n=len(known) or 1, cutoff=0.0)
    return [*close, *(one for one in known if one not in close)]


def _violations(definition: ToolDefinition, given: Arguments) -> "list[ValidationError]":
    """By field. Raises BadRequest `invalid_tool` where it is the schema that is wrong."""
    from jsonschema import Draft202012Validator  # here: see `Tools.ready`

    validator = Draft202012Validator(definition.parameters, registry=_NOTHING_ELSEWHERE)
    try:
        found = list(islice(validator.iter_errors(given), _ERRORS_MAX))
    except (Unresolvable, RecursionError, re.error) as error:
        raise BadRequest(
            f"these arguments cannot be checked: {error!s:.200}",
            code="invalid_tool",
            hint=f"use another tool: the schema of {definition.name} is broken",
        ) from error
    return sorted(found, key=lambda error: [str(part) for part in error.absolute_path])


def _object(text: str) -> dict[str, Any]:
    if len(text) > TEXT_MAX:
        raise _bad(f"the arguments are longer than {TEXT_MAX} characters of JSON")
    try:
        given = json.loads(text.strip() or "{}", parse_constant=_no_number, parse_float=_finite)
        if _ESCAPED_SURROGATE.search(text):
            text = json.dumps(given, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise _bad("the arguments have half of a surrogate pair, which is no character") from None
    except json.JSONDecodeError as error:
        raise _bad(f"the arguments are not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(f"the arguments are not JSON that can be read: {error}"[:_TOLD_MAX]) from None
    if not isinstance(given, dict):
        raise _bad(f"the arguments are {_kind(given)}, and must be a JSON object")
    if _is_deep(given):
        raise _bad(f"the arguments are nested more than {_DEPTH_MAX} deep")
    return given


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no number of JSON, or none that can be written again")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(_DEPTH_MAX):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for many in inner for one in many if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _sentences(error: "ValidationError") -> Iterator[str]:
    """What is wrong with which field. jsonschema's own message would repeat the value, which may be
    long and is known to whom wrote it."""
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
            wanted = error.validator_value
            kinds = wanted if isinstance(wanted, str) else " or ".join(wanted)
            yield f"'{_field(error)}' must be of type {kinds}, and is {_kind(error.instance)}"
        case "enum":
            choices = ", ".join(json.dumps(one) for one in error.validator_value)
            yield f"'{_field(error)}' must be one of {choices}"[:_TOLD_MAX]
        case _:
            said = error.message
            if len(said) > _TOLD_MAX:
                said = f"{said[: _TOLD_MAX // 2]} … {said[-_TOLD_MAX // 2 :]}"
            yield f"'{_field(error)}': {said}"


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
