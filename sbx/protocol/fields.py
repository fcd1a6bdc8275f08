"""Dataclasses whose JSON object has every field by its own name."""

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def read_fields(kind: type[T], data: Any) -> T:
    """Return the dataclass `kind` with the fields of a JSON object. Ignore unknown fields.

    Raise ValueError, which names the field, for a missing field and for a value of another type.
    """
    import msgspec  # takes 15 ms, which a program that only connects does not need

    value = msgspec.convert(data, kind)
    for field in fields(kind):  # type: ignore[arg-type]  # it is a dataclass
        if field.name not in data:  # msgspec accepts that if the field has a default
            raise ValueError(f"the required field `{field.name}` is missing")
    return value


def write_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass. Enums become their values."""
    import msgspec

    written: dict[str, Any] = msgspec.to_builtins(value)
    return written
