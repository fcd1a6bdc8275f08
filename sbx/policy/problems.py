"""What is wrong with a policy, for the person who wrote it: file, line or key, the right word."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from sbx.errors import PolicyError

_MOST_LISTED = 50  # a file of nonsense has as many problems as lines


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `key` is dotted as in `limits.memory_max`; `message` names it."""

    message: str
    file: Path | None = None
    key: str | None = None
    line: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = [_printable(str(part)) for part in (self.file, self.line) if part is not None]
        return ": ".join([":".join(where), self.message]) if where else self.message

    def to_dict(self) -> dict[str, Any]:
        said = {"file": self.file and str(self.file), "key": self.key, "line": self.line}
        return (
            {"message": self.message}
            | {k: v for k, v in said.items() if v}
            | ({"hint": self.hint} if self.hint else {})
        )


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def policy_error(problems: Sequence[Problem], *, code: str | None = None) -> PolicyError:
    """One error that says the first problem and lists them all in its details."""
    more = len(problems) - 1
    also = f" (and {more} more problem{'s' if more > 1 else ''})" if more else ""
    return PolicyError(
        f"{problems[0]}{also}",
        code=code,
        hint=problems[0].hint,
        details={"problems": [problem.to_dict() for problem in problems[:_MOST_LISTED]]},
    )


def invalid(message: str, *, hint: str | None = None) -> PydanticCustomError:
    """What a validator raises: the sentence goes through pydantic unchanged, hint beside it."""
    return PydanticCustomError("invalid", "{message}", {"message": message, "hint": hint})


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a slip of."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def shown(value: object) -> str:
    """A value of the file, as text that is safe and short enough for a terminal."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "this number"  # python refuses to print more than 4300 digits
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
    """Each of pydantic's errors as its place and a problem without a file.

    `top` are the keys that may stand at the top, in the words of whoever wrote them.
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
    """("filesystem", "mount", 0, "source") → filesystem.mount[0].source"""
    key = ""
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            word = part if part.replace("-", "").replace("_", "").isalnum() else shown(part)
            key += f".{word}" if key else word
    return key


def _sentence(detail: ErrorDetails) -> str:
    kind, given, context = detail["type"], shown(detail["input"]), detail.get("ctx", {})
    match kind:
        case "invalid":
            return str(context["message"])
        case "literal_error":
            choices = str(context["expected"]).replace("'", '"')
            return f"must be {choices}, not {given}{_did_you_mean(detail['input'], choices)}"
        case "missing":
            return "is missing"
        case "greater_than_equal":
            return f"must be at least {context['ge']}, not {given}"
        case "less_than_equal":
            return f"must be at most {context['le']}, not {given}"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "too_long":
            return f"holds more than {context['max_length']} entries"
        case "string_too_long":
            return f"is longer than {context['max_length']} characters"
    wanted = next((words for prefix, words in _WANTED.items() if kind.startswith(prefix)), None)
    return f"must be {wanted}, not {given}" if wanted else str(detail["msg"])


_WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "string_type": "text in quotes",
    "tuple": "a list",
    "model": "a table",
    "dict": "a table",
    "mapping": "a table",
}


def _did_you_mean(given: object, choices: str) -> str:
    words = choices.replace(" or ", ", ").replace('"', "").split(", ")
    near = nearest(given, words) if isinstance(given, str) else None
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


# What other tools call it, too far from our word for a spelling match.
_ALSO_CALLED = {
    "timeout": "limits.wall_time",
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
    """The key that was meant: another tool's word, a slip, or the right word in the wrong table."""
    called = _ALSO_CALLED.get(word)
    if called and table in ("", called.rpartition(".")[0]):
        return called
    near = nearest(word, keys)
    here = (f"{table}.{near}" if table else near) if near else None
    elsewhere = next((key for key in all_keys(model) if key.rpartition(".")[2] == word), None)
    return (here or elsewhere) if table else (elsewhere or here)


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a model; of a table its keys, not itself."""
    for name, field in _keys(model).items():
        if inner := _table_in(field.annotation):
            yield from all_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a table by the words of a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _table_at(path: Iterable[Any], model: type[BaseModel]) -> type[BaseModel]:
    for part in path:
        # Beside keys there are the places of a list, and the names in a table of tables.
        if isinstance(part, str) and (field := _keys(model).get(part)) is not None:
            model = _table_in(field.annotation) or model
    return model


def _table_in(annotation: object) -> type[BaseModel] | None:
    """The model that a field holds, alone, in a list or by names."""
    for held in (annotation, *get_args(annotation)):
        if isinstance(held, type) and issubclass(held, BaseModel):
            return held
    return None
