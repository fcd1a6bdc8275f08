"""Problems of a policy, for its author: the file, the line or the key, and the correct word."""

import json
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from sbx.errors import PolicyError

_MOST_LISTED = 50  # a file of random text has as many problems as lines


class Problem(Struct, frozen=True):
    """One problem of a policy. `key` is dotted, as in `limits.memory_max`; `message` includes
    it."""

    message: str
    file: Path | None = None
    key: str | None = None
    line: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = [_printable(str(part)) for part in (self.file, self.line) if part is not None]
        return ": ".join([":".join(where), self.message]) if where else self.message

    def to_dict(self) -> dict[str, Any]:
        location = {"file": self.file and str(self.file), "key": self.key, "line": self.line}
        return (
            {"message": self.message}
            | {k: v for k, v in location.items() if v}
            | ({"hint": self.hint} if self.hint else {})
        )


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def policy_error(problems: Sequence[Problem], *, code: str | None = None) -> PolicyError:
    """Return one error with the first problem in its message and all of them in its details."""
    more = len(problems) - 1
    also = f" (and {more} more problem{'s' if more > 1 else ''})" if more else ""
    return PolicyError(
        f"{problems[0]}{also}",
        code=code,
        hint=problems[0].hint,
        details={"problems": [problem.to_dict() for problem in problems[:_MOST_LISTED]]},
    )


def invalid(message: str, *, hint: str | None = None) -> PydanticCustomError:
    """Return an error for a validator to raise. pydantic keeps its message and its hint
    unchanged."""
    return PydanticCustomError("invalid", "{message}", {"message": message, "hint": hint})


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the word of `words` that `word` is most likely a misspelling of, or None."""
    matches = get_close_matches(word, list(words), n=1, cutoff=0.6)
    return matches[0] if matches else None


def shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "this number"  # Python refuses to print more than 4300 digits
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def explain(
    error: ValidationError, model: type[BaseModel], top: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    """Yield the location of each error of pydantic, and the error as a problem without a file.

    `top` are the keys that are valid at the top level of the author's text.
    """
    for detail in error.errors(include_url=False):
        loc = tuple(part for part in detail["loc"] if part != "[key]")
        key = dotted(loc)
        if detail["type"] == "extra_forbidden":
            yield loc, _unknown(loc, key, model, top)
            continue
        message = _sentence(detail)
        yield (
            loc,
            Problem(
                message if not key else f"{key}: {message}",
                key=key or None,
                hint=detail.get("ctx", {}).get("hint"),
            ),
        )


def dotted(loc: Sequence[Any]) -> str:
    """Return a location as a dotted key.

    ("filesystem", "mount", 0, "source") → filesystem.mount[0].source
    """
    key = ""
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            word = part if part.replace("-", "").replace("_", "").isalnum() else shown(part)
            key += f".{word}" if key else word
    return key


def _sentence(detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], shown(detail["input"]), detail.get("ctx", {})
    match kind:
        case "invalid":
            return str(context["message"])
        case "literal_error":
            choices = str(context["expected"]).replace("'", '"')
            return f"must be {choices}, not {value}{_did_you_mean(detail['input'], choices)}"
        case "missing":
            return "is missing"
        case "greater_than_equal":
            return f"must be at least {context['ge']}, not {value}"
        case "less_than_equal":
            return f"must be at most {context['le']}, not {value}"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "too_long":
            return f"contains more than {context['max_length']} entries"
        case "string_too_long":
            return f"is longer than {context['max_length']} characters"
    expected = next((words for prefix, words in _EXPECTED.items() if kind.startswith(prefix)), None)
    return f"must be {expected}, not {value}" if expected else str(detail["msg"])


_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "string_type": "text in quotes",
    "tuple": "a list",
    "model": "a table",
    "dict": "a table",
    "mapping": "a table",
}


def _did_you_mean(value: object, choices: str) -> str:
    words = choices.replace(" or ", ", ").replace('"', "").split(", ")
    near = nearest(value, words) if isinstance(value, str) else None
    return f'; did you mean "{near}"?' if near else ""


def _unknown(loc: Sequence[Any], key: str, model: type[BaseModel], top: Sequence[str]) -> Problem:
    *path, last = loc
    keys = list(_keys(_table_at(path, model))) if path else top
    table = dotted([part for part in path if isinstance(part, str)])
    meant = _meant(str(last), table, keys, model)
    return Problem(
        f"unknown key {key}" + (f"; did you mean {meant}?" if meant else ""),
        key=key,
        hint=f"the keys {f'of [{table}]' if table else 'here'} are {', '.join(keys)}",
    )


# The words of other tools, too different from the keys of sbx for a spelling match.
_ALSO_CALLED = {
    "timeout": "limits.run_timeout",
    "memory": "limits.memory_max",
    "pids": "limits.tasks_max",
    "cpu": "limits.cpu_quota",
    "cpus": "limits.cpu_quota",
    "environment": "env",
    "mounts": "filesystem.mount",
    "hosts": "network.allow",
    "domains": "network.allow",
}


def _meant(word: str, table: str, keys: Sequence[str], model: type[BaseModel]) -> str | None:
    """Return the key that the author probably meant, or None.

    Candidates are the word of another tool, a misspelling, and the correct word in the wrong table.
    """
    called = _ALSO_CALLED.get(word)
    if called and table in ("", called.rpartition(".")[0]):
        return called
    near = nearest(word, keys)
    here = (f"{table}.{near}" if table else near) if near else None
    elsewhere = next((key for key in all_keys(model) if key.rpartition(".")[2] == word), None)
    return (here or elsewhere) if table else (elsewhere or here)


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key below a model. Of a table, yield its keys and not the table itself."""
    for name, field in _keys(model).items():
        if inner := _table_in(field.annotation):
            yield from all_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a table by their names in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _table_at(path: Iterable[Any], model: type[BaseModel]) -> type[BaseModel]:
    for part in path:
        # Other parts are positions in a list, and the names in a table of tables.
        if isinstance(part, str) and (field := _keys(model).get(part)) is not None:
            model = _table_in(field.annotation) or model
    return model


def _table_in(annotation: object) -> type[BaseModel] | None:
    """Return the model that a field contains: alone, in a list or in a mapping."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
