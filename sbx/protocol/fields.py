"""Dataclasses whose JSON object has every field by its own name."""

from typing import Any, TypeVar

T = TypeVar("T")


def read_fields(kind: type[T], data: Any) -> T:
    """Return the dataclass `kind` with the fields of a JSON object. Ignore unknown fields.

    Raise ValueError, which names the field, for a missing field and for a value of another type.
    """
    import msgspec  # takes 15 ms, which a program that only connects does not need

    return msgspec.convert(data, kind)
