"""Parse sizes, times and shares of CPU in the notation of policies, and format them again.

    size       "64KiB" "512MiB" "1.5GiB" "2TiB" "100B", or a plain number of bytes
    duration   "500ms" "60s" "5min" "2h" "1d", or a plain number of seconds; whole milliseconds
    rate       a size per second, or "none": no limit
    cpu        "100%" is one CPU, "150%" one and a half; 1.5 means the same, a bare 150 is refused

`parse_*` reads the output of `format_*` back to the same value. A wrong unit is an error that names
the correct one. "MB" is a wrong unit, because half of its readers take it for 1000000 bytes.
(Pydantic's `ByteSize` also reads it so, accepts `true` as one byte and prints rounded values. Its
durations are ISO 8601.)

Every `parse_*` raises a ValueError that pydantic accepts.
"""

import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Annotated, NoReturn

from pydantic import BeforeValidator, PlainSerializer

from sbx.policy.problems import invalid, shown

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))

_BYTES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_MILLISECONDS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_MOST_BYTES = (1 << 63) - 1  # the maximum that Linux accepts for any limit
_MOST_DAYS = 3650
_MOST_PERCENT = 102_400
_QUANTITY = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z%]*)")


def parse_size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        size = Decimal(value)
    else:
        number, unit = _split(value, 'a size such as "512MiB"')
        if unit not in _BYTES:
            _wrong_unit(value, unit, _BYTES, _nearest_size)
        size = number * _BYTES[unit]
    if not 0 <= size <= _MOST_BYTES or size != int(size):
        raise invalid(f"{shown(value)} is not a whole number of bytes from 0 to 8EiB")
    return int(size)


def format_size(size: int) -> str:
    """Return the size in the largest unit that gives a whole number."""
    for unit, length in reversed(_BYTES.items()):
        if size >= length and size % length == 0:
            return f"{size // length}{unit}"
    return "0B"


def parse_rate(value: object) -> float:
    """Return bytes per second. "none" is infinity, so that every other rate is smaller."""
    return math.inf if value in ("none", math.inf) else parse_size(value)


def format_rate(rate: float) -> str:
    return "none" if rate == math.inf else format_size(int(rate))


def parse_duration(value: object) -> float:
    if isinstance(value, int) and not isinstance(value, bool):
        milliseconds = Decimal(value) * 1000
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise invalid(f'{shown(value)} is not a finite time: write one such as "60s"')
        milliseconds = Decimal(repr(value)) * 1000
    else:
        number, unit = _split(value, 'a time such as "60s"')
        if unit not in _MILLISECONDS:
            _wrong_unit(value, unit, _MILLISECONDS, _nearest_duration)
        milliseconds = number * _MILLISECONDS[unit]
    if not 0 <= milliseconds <= _MOST_DAYS * _MILLISECONDS["d"]:
        raise invalid(f"{shown(value)} is not between 0s and {_MOST_DAYS}d")
    if milliseconds != int(milliseconds):
        raise invalid(f"{shown(value)} is finer than a millisecond")
    return int(milliseconds) / 1000


def format_duration(seconds: float) -> str:
    """Return the time in the largest unit that gives a whole number above one: 60s, not 1min."""
    milliseconds = round(seconds * 1000)
    for unit, length in reversed(_MILLISECONDS.items()):
        if milliseconds > length and milliseconds % length == 0:
            return f"{milliseconds // length}{unit}"
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


def parse_cpu(value: object) -> float:
    """Return a number of CPUs: 1.0 is one whole CPU.

    The minimum is a hundredth of a CPU. The value is rounded to hundredths of a percent.
    """
    expected = 'a share of CPU: write "150%" for one and a half'
    if isinstance(value, float):
        if not math.isfinite(value):
            raise invalid(f"{shown(value)} is not {expected}")
        percent = Decimal(repr(value)) * 100
    else:
        # A bare 50 may mean 50% or 50 CPUs. Reading it as 50 CPUs would be a security hole.
        percent, unit = _split(value, expected)
        if unit != "%":
            raise invalid(f"{shown(value)} is not {expected}")
    if not 1 <= percent <= _MOST_PERCENT:
        raise invalid(f"{shown(value)} is not between 1% and {_MOST_PERCENT}%")
    return float(round(percent, 2) / 100)


def format_cpu(cpus: float) -> str:
    return f"{round(Decimal(repr(cpus)) * 100, 2).normalize():f}%"


def _split(value: object, expected: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise invalid(f"{shown(value)} is not {expected}")
    return Decimal(match[1]), match[2]


def _nearest_size(unit: str) -> str:
    return next(
        (candidate for candidate in _BYTES if candidate[0].lower() == unit[:1].lower()), "B"
    )


def _nearest_duration(unit: str) -> str:
    """Return the unit meant by "sec", "Minutes", "m", "hrs" or "millis"; "" for any other word."""
    word = unit.lower()
    if word.startswith(("ms", "mil")):
        return "ms"
    if not word:
        return "s"
    return next((each for each in ("s", "min", "h", "d") if each[0] == word[0]), "")


def _wrong_unit(
    value: object, unit: str, units: Iterable[str], nearest: Callable[[str], str]
) -> NoReturn:
    number = str(value).strip().removesuffix(unit).strip()
    problem = f"{unit} is not a unit here" if unit else "a unit is missing"
    if guess := nearest(unit):
        problem += f'; did you mean "{number}{guess}"?'
    raise invalid(
        f"{shown(value)}: {problem}",
        hint=f"the units are {', '.join(units)}",
    )


Size = Annotated[
    int, BeforeValidator(parse_size), PlainSerializer(format_size, str, when_used="json")
]
Rate = Annotated[
    float, BeforeValidator(parse_rate), PlainSerializer(format_rate, str, when_used="json")
]
Duration = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(format_duration, str, when_used="json")
]
Cpu = Annotated[
    float, BeforeValidator(parse_cpu), PlainSerializer(format_cpu, str, when_used="json")
]
