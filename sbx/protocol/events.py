"""Events and runs as JSON and back: what goes over the socket, and what the store keeps.

Both ways are total and inverse: every event and every `Run` has a form, of dicts with text as keys,
lists, text, numbers, booleans and null; any encoder of JSON takes it, and what is read back equals
what was told. Three things that Python has and JSON has not are written so:

    nan, inf, -inf                {"$float": "nan"}
    an int of 4000 digits         {"$int": "-0x1f…"}     json.dumps would refuse to write it
    half of a surrogate pair      U+FDD0 and its four hex digits; U+FDD0 itself is doubled

U+FDD0 is no character of Unicode, so all other text stays as it is. A dict that looks like one of
the first two is told apart by one more `$`. Tuples become lists, and bytes have no form at all.

With `encoded=True`, the JSON parts of a `Bundle` are not decoded: in the form they are
`msgspec.Raw`, which `encode` copies. A service uses nothing else for runs.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, TypeVar

from sbx.protocol.bundles import Bundle, Part
from sbx.protocol.runs import (
    Cause,
    Clear,
    Display,
    Error,
    Event,
    InputRequest,
    Quarantined,
    Result,
    Run,
    RunEnd,
    RunError,
    RunStart,
    Status,
    Stderr,
    Stdout,
)

if TYPE_CHECKING:
    import msgspec

T = TypeVar("T")
Json = dict[str, Any]

_MARK = "\ufdd0"
_TO_ESCAPE = re.compile("[\ud800-\udfff\ufdd0]")
_ESCAPED = re.compile("\ufdd0(\ufdd0|d[89a-f][0-9a-f]{2})")
_LOOKS_MARKED = re.compile(r"\$+(?:float|int)")
_INT_BITS_MAX = 13_000  # below the 4300 digits that sys.set_int_max_str_digits allows
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


# -- values ----------------------------------------------------------------------------------------


def text_to_json(text: str) -> str:
    """The text as UTF-8 can carry it."""
    if text.isascii():
        return text
    return _TO_ESCAPE.sub(_escape, text)


def text_from_json(text: str) -> str:
    """Raises ValueError for what is no text."""
    if type(text) is not str:
        raise ValueError(f"text was expected, not {type(text).__name__}")
    if text.isascii():
        return text
    return _ESCAPED.sub(_unescape, text)


def value_to_json(value: Any) -> Any:
    """The form of a part of a bundle. Raises TypeError for what JSON has no place for."""
    match value:
        case None | bool():
            return value
        case str():
            return text_to_json(value)
        case int():
            return int(value) if value.bit_length() <= _INT_BITS_MAX else {"$int": hex(value)}
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case Mapping():
            return _object_to_json(value)
        case list() | tuple():
            return [value_to_json(item) for item in value]
        case _:
            raise TypeError(f"JSON has no form of {type(value).__name__}")


def value_from_json(value: Any) -> Any:
    """What `value_to_json` was given; a form that it never makes is taken as it stands."""
    match value:
        case str():
            return text_from_json(value)
        case dict():
            return _object_from_json(value)
        case list():
            return [value_from_json(item) for item in value]
        case _:
            return value


def _object_to_json(value: Mapping[str, Any], *, encoded: bool = False) -> Json:
    written = {}
    items = value.stored() if encoded and isinstance(value, Bundle) else value.items()
    for key, item in items:
        if not isinstance(key, str):
            raise TypeError(f"a key of JSON is text, not {type(key).__name__}")
        written[text_to_json(key)] = _part(item) if type(item) is Part else value_to_json(item)
    if len(written) == 1:
        (key,) = written
        if _LOOKS_MARKED.fullmatch(key):
            return {f"${key}": written[key]}
    return written


def _part(part: Part) -> "msgspec.Raw":
    import msgspec  # 15 ms that a program which only connects need not spend

    if part.marked:
        return msgspec.Raw(msgspec.json.encode(value_to_json(part.value())))
    return msgspec.Raw(part.encoded)


def _object_from_json(value: Json) -> Any:
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == "$float" and isinstance(item, str) and item in _NOT_FINITE:
            return _NOT_FINITE[item]
        if key == "$int" and isinstance(item, str):
            return int(item, 16)
        if key.startswith("$$") and _LOOKS_MARKED.fullmatch(key):
            return {key[1:]: value_from_json(item)}
    return {text_from_json(key): value_from_json(item) for key, item in value.items()}


def _escape(found: re.Match[str]) -> str:
    character = found.group()
    return _MARK + (_MARK if character == _MARK else f"{ord(character):x}")


def _unescape(found: re.Match[str]) -> str:
    digits = found.group(1)
    return _MARK if digits == _MARK else chr(int(digits, 16))


# -- runs ------------------------------------------------------------------------------------------


def run_to_json(run: Run, *, encoded: bool = False) -> Json:
    """Every field by its own name; durations in seconds."""
    return {
        "run_id": text_to_json(run.run_id),
        "status": run.status.value,
        "cause": run.cause and run.cause.value,
        "stdout": text_to_json(run.stdout),
        "stderr": text_to_json(run.stderr),
        "text": text_to_json(run.text),
        "result": run.result if run.result is None else text_to_json(run.result),
        "outputs": [_object_to_json(bundle, encoded=encoded) for bundle in run.outputs],
        "error": run.error and error_to_json(run.error),
        "exit_code": run.exit_code,
        "execution_count": run.execution_count,
        "duration_s": value_to_json(run.duration_s),
        "state_lost": run.state_lost,
        "truncated": run.truncated,
        **(
            {"quarantined": [_quarantined_to_json(item) for item in run.quarantined]}
            if run.quarantined
            else {}
        ),
    }


def _quarantined_to_json(item: Quarantined) -> Json:
    return {
        "path": text_to_json(item.path),
        "name": text_to_json(item.name),
        "why": text_to_json(item.why),
        "id": item.id,
    }


def _quarantined_from_json(data: Json) -> Quarantined:
    path, name, why = (text_from_json(data[key]) for key in ("path", "name", "why"))
    return Quarantined(path, name, why, str(data["id"]))


def run_from_json(told: Json) -> Run:
    """Raises ValueError for what is no run; fields that are unknown here are left aside."""
    return _read(
        "a run",
        lambda: Run(
            run_id=text_from_json(told["run_id"]),
            status=Status(told["status"]),
            cause=_optional(Cause, told.get("cause")),
            stdout=text_from_json(told["stdout"]),
            stderr=text_from_json(told["stderr"]),
            text=text_from_json(told["text"]),
            result=_optional(text_from_json, told.get("result")),
            outputs=tuple(_bundle(part) for part in told["outputs"]),
            error=_optional(error_from_json, told.get("error")),
            exit_code=told.get("exit_code"),
            execution_count=told.get("execution_count"),
            duration_s=value_from_json(told["duration_s"]),
            state_lost=told["state_lost"],
            truncated=told["truncated"],
            quarantined=tuple(_quarantined_from_json(one) for one in told.get("quarantined", ())),
        ),
    )


def error_to_json(error: RunError) -> Json:
    return {
        "name": text_to_json(error.name),
        "value": text_to_json(error.value),
        "traceback": text_to_json(error.traceback),
    }


def error_from_json(told: Json) -> RunError:
    """Raises ValueError."""
    return _read(
        "an error",
        lambda: RunError(
            text_from_json(told["name"]),
            text_from_json(told["value"]),
            text_from_json(told["traceback"]),
        ),
    )


# -- events ----------------------------------------------------------------------------------------


def to_json(event: Event, *, encoded: bool = False) -> Json:
    """The event with its `type`; that of a RunEnd carries the whole run as `run`."""
    match event:
        case RunStart(run_id):
            rest: Json = {"run_id": text_to_json(run_id)}
        case Stdout(text) | Stderr(text):
            rest = {"text": text_to_json(text)}
        case Display(data, metadata, display_id, update):
            shown = _shown(data, metadata, encoded)
            name = display_id if display_id is None else text_to_json(display_id)
            rest = {"data": shown[0], "metadata": shown[1], "display_id": name, "update": update}
        case Clear(wait):
            rest = {"wait": wait}
        case Result(data, metadata, count):
            shown = _shown(data, metadata, encoded)
            rest = {"data": shown[0], "metadata": shown[1], "execution_count": count}
        case Error(error):
            rest = {"error": error_to_json(error)}
        case InputRequest(prompt, password):
            rest = {"prompt": text_to_json(prompt), "password": password}
        case RunEnd(run):
            rest = {"run": run_to_json(run, encoded=encoded)}
    return {"type": event.type, **rest}


def _shown(
    data: Mapping[str, Any], metadata: Mapping[str, Any], encoded: bool
) -> tuple[Json, Json]:
    return _object_to_json(data, encoded=encoded), _object_to_json(metadata, encoded=encoded)


def encode(form: Mapping[str, Any]) -> bytes:
    """Return the form as JSON in ASCII."""
    try:
        return json.dumps(form, separators=(",", ":")).encode("ascii")
    except TypeError:  # it has parts that are encoded already
        import msgspec

        return _in_ascii(msgspec.json.encode(form))


def _in_ascii(encoded: bytes) -> bytes:
    """JSON without line ends, with each character beyond ASCII as an escape.

    The function of the standard library runs at the speed of C, but it also puts a backslash in
    front of each quote and of each backslash. These are taken back.
    """
    if encoded.isascii():
        return encoded
    text = encode_basestring_ascii(encoded.decode())[1:-1]
    return text.replace("\\\\", "\\").replace('\\"', '"').encode("ascii")


def event_from_json(told: Json) -> Event:
    """The event again. Raises ValueError for what is none, and for a type unknown here."""
    kind = told.get("type") if isinstance(told, dict) else None
    maker = _MAKERS.get(kind) if isinstance(kind, str) else None
    if maker is None:
        raise ValueError(f"no event is of type {str(kind)[:80]!r}")
    return _read(f"an event {kind}", lambda: maker(told))


_MAKERS: dict[str, Callable[[Json], Event]] = {
    "run_start": lambda told: RunStart(text_from_json(told["run_id"])),
    "stdout": lambda told: Stdout(text_from_json(told["text"])),
    "stderr": lambda told: Stderr(text_from_json(told["text"])),
    "display": lambda told: Display(
        _bundle(told["data"]),
        _bundle(told["metadata"]),
        _optional(text_from_json, told.get("display_id")),
        told.get("update", False),
    ),
    "clear": lambda told: Clear(told["wait"]),
    "result": lambda told: Result(
        _bundle(told["data"]), _bundle(told["metadata"]), told.get("execution_count")
    ),
    "error": lambda told: Error(error_from_json(told["error"])),
    "input_request": lambda told: InputRequest(text_from_json(told["prompt"]), told["password"]),
    "run_end": lambda told: RunEnd(run_from_json(told["run"])),
}


def _bundle(told: Any) -> dict[str, Any]:
    read = _object_from_json(told) if isinstance(told, dict) else None
    if not isinstance(read, dict):
        raise ValueError("a bundle is an object")
    return read


def _optional(read: Callable[[Any], T], told: Any) -> T | None:
    return None if told is None else read(told)


def _read(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{what} lacks or garbles {error}") from None
