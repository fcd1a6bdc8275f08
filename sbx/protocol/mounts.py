"""A directory of the host that is mounted to a live sandbox."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mount:
    """`source` is its path on the host, `target` its path inside."""

    source: str
    target: str
    read_only: bool
