"""Events and runs as JSON and back, for the socket and for the store.

The two directions are total and inverse. Every event and every `Run` has a form that consists of
dicts with text as keys, lists, text, numbers, booleans and null. Any encoder of JSON accepts the
form, and reading it back gives an equal value. Python has three things that JSON does not have:

    nan, inf, -inf                {"$float": "nan"}
    an int of 4000 digits         {"$int": "-0x1f…"}     json.dumps would refuse to write it
    half of a surrogate pair      U+FDD0 and its four hex digits; U+FDD0 itself is doubled

U+FDD0 is not a character of Unicode, so all other text stays unchanged. One more `$` marks a dict
that only looks like one of the first two. Tuples become lists. Bytes have no form.

With `encoded=True`, the JSON parts of a `Bundle` are not decoded: in the form they are
`msgspec.Raw`, which `encode` copies. A service always uses this mode for runs.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, TypeVar

from sbx.protocol.bundles import Bundle, BundlePart
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

_PIECE = 64 << 10  # characters
_MARK = "\ufdd0"
_TO_ESCAPE = re.compile("[\ud800-\udfff\ufdd0]")
_ESCAPED = re.compile("\ufdd0(\ufdd0|d[89a-f][0-9a-f]{2})")
_LOOKS_MARKED = re.compile(r"\$+(?:float|int)")
_INT_BITS_MAX = 13_000  # below the 4300 digits that sys.set_int_max_str_digits allows
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


# -- values ----------------------------------------------------------------------------------------


def text_to_json(text: str) -> str:
    """Return the text in a form that UTF-8 can encode."""
    if text.isascii():
        return text
    pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return "".join([_TO_ESCAPE.sub(_escape, piece) for piece in pieces])


def text_from_json(text: str) -> str:
    """Return the original text. Raise ValueError if the value is not text."""
    if type(text) is not str:
        raise ValueError(f"text was expected, not {type(text).__name__}")
    if text.isascii():
        return text
    return _ESCAPED.sub(_unescape, text)


def value_to_json(value: Any) -> Any:
    """Return the form of a part of a bundle. Raise TypeError for a value that JSON cannot
    represent."""
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
            raise TypeError(f"JSON cannot represent {type(value).__name__}")


def value_from_json(value: Any) -> Any:
    """Return the original value of `value_to_json`. Return any other form unchanged."""
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
            raise TypeError(f"a key of JSON must be text, not {type(key).__name__}")
        written[text_to_json(key)] = (
            _part(item) if type(item) is BundlePart else value_to_json(item)
        )
    if len(written) == 1:
        (key,) = written
        if _LOOKS_MARKED.fullmatch(key):
            return {f"${key}": written[key]}
    return written


def _part(part: BundlePart) -> "msgspec.Raw":
    import msgspec  # takes 15 ms, which a program that only connects does not need

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


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return _MARK + (_MARK if character == _MARK else f"{ord(character):x}")


def _unescape(match: re.Match[str]) -> str:
    digits = match.group(1)
    return _MARK if digits == _MARK else chr(int(digits, 16))


# -- runs ------------------------------------------------------------------------------------------


def run_to_json(run: Run, *, encoded: bool = False) -> Json:
    """Return every field by its own name. Durations are in seconds."""
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


def run_from_json(data: Json) -> Run:
    """Return the run. Ignore unknown fields. Raise ValueError for invalid data."""
    return _read(
        "a run",
        lambda: Run(
            run_id=text_from_json(data["run_id"]),
            status=Status(data["status"]),
            cause=_optional(Cause, data.get("cause")),
            stdout=text_from_json(data["stdout"]),
            stderr=text_from_json(data["stderr"]),
            text=text_from_json(data["text"]),
            result=_optional(text_from_json, data.get("result")),
            outputs=tuple(_bundle(part) for part in data["outputs"]),
            error=_optional(error_from_json, data.get("error")),
            exit_code=data.get("exit_code"),
            execution_count=data.get("execution_count"),
            duration_s=value_from_json(data["duration_s"]),
            state_lost=data["state_lost"],
            truncated=data["truncated"],
            quarantined=tuple(_quarantined_from_json(item) for item in data.get("quarantined", ())),
        ),
    )


def error_to_json(error: RunError) -> Json:
    return {
        "name": text_to_json(error.name),
        "value": text_to_json(error.value),
        "traceback": text_to_json(error.traceback),
        "traceback_ansi": text_to_json(error.traceback_ansi),
        "exit_text": None if error.exit_text is None else text_to_json(error.exit_text),
    }


def error_from_json(data: Json) -> RunError:
    """Return the error. Raise ValueError for invalid data. Earlier versions sent and stored one
    traceback, with its colours."""
    return _read(
        "an error",
        lambda: RunError(
            text_from_json(data["name"]),
            text_from_json(data["value"]),
            text_from_json(data.get("traceback_ansi") or data["traceback"]),
            None if (text := data.get("exit_text")) is None else text_from_json(text),
        ),
    )


# -- events ----------------------------------------------------------------------------------------


def to_json(event: Event, *, encoded: bool = False) -> Json:
    """Return the event with its `type`. A RunEnd contains the whole run as `run`."""
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
    """Return the form as JSON in ASCII. Long texts are encoded in pieces: other threads can have
    the interpreter lock between two of them."""
    return b"".join(_pieces(form))


def decode(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError. msgspec takes 15 ms for 16 MiB with many
    escapes, of which the standard library takes 50 ms, but it takes long to import."""
    if len(text) > _PIECE:
        import msgspec

        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(text)
    return json.loads(text)


def _pieces(value: Any) -> Iterator[bytes]:
    if type(value) is str and len(value) > _PIECE:
        yield b'"'
        for start in range(0, len(value), _PIECE):
            piece = encode_basestring_ascii(value[start : start + _PIECE])
            yield piece[1:-1].encode("ascii")
        yield b'"'
    elif type(value) is dict and has_long_text(value):
        before = b"{"
        for name, part in value.items():
            yield before + encode_basestring_ascii(name).encode("ascii") + b":"
            yield from _pieces(part)
            before = b","
        yield b"}"
    elif type(value) is list and has_long_text(value):
        before = b"["
        for part in value:
            yield before
            yield from _pieces(part)
            before = b","
        yield b"]"
    else:
        yield _encoded(value)


def has_long_text(value: Any) -> bool:
    """Return whether `encode` takes more than a moment for a text of this form."""
    if type(value) is dict:
        return any(map(has_long_text, value.values()))
    if type(value) is list:
        return any(map(has_long_text, value))
    return type(value) is str and len(value) > _PIECE


def _encoded(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except TypeError:  # it contains parts that are encoded already
        import msgspec

        return _in_ascii(msgspec.json.encode(value))


def _in_ascii(encoded: bytes) -> bytes:
    """Return JSON without line ends, with each character beyond ASCII as an escape.

    The function of the standard library runs at the speed of C, but it also escapes each quote and
    each backslash. These escapes are removed again.
    """
    if encoded.isascii():
        return encoded
    text = encode_basestring_ascii(encoded.decode())[1:-1]
    return text.replace("\\\\", "\\").replace('\\"', '"').encode("ascii")


def event_from_json(data: Json) -> Event:
    """Return the event. Raise ValueError for invalid data and for an unknown type."""
    kind = data.get("type") if isinstance(data, dict) else None
    maker = _MAKERS.get(kind) if isinstance(kind, str) else None
    if maker is None:
        raise ValueError(f"unknown type of an event: {str(kind)[:80]!r}")
    return _read(f"an event {kind}", lambda: maker(data))


_MAKERS: dict[str, Callable[[Json], Event]] = {
    "run_start": lambda data: RunStart(text_from_json(data["run_id"])),
    "stdout": lambda data: Stdout(text_from_json(data["text"])),
    "stderr": lambda data: Stderr(text_from_json(data["text"])),
    "display": lambda data: Display(
        _bundle(data["data"]),
        _bundle(data["metadata"]),
        _optional(text_from_json, data.get("display_id")),
        data.get("update", False),
    ),
    "clear": lambda data: Clear(data["wait"]),
    "result": lambda data: Result(
        _bundle(data["data"]), _bundle(data["metadata"]), data.get("execution_count")
    ),
    "error": lambda data: Error(error_from_json(data["error"])),
    "input_request": lambda data: InputRequest(text_from_json(data["prompt"]), data["password"]),
    "run_end": lambda data: RunEnd(run_from_json(data["run"])),
}


def _bundle(data: Any) -> dict[str, Any]:
    bundle = _object_from_json(data) if isinstance(data, dict) else None
    if not isinstance(bundle, dict):
        raise ValueError("a bundle must be an object")
    return bundle


def _optional(read: Callable[[Any], T], data: Any) -> T | None:
    return None if data is None else read(data)


def _read(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{what} has a missing or invalid field: {error}") from None
