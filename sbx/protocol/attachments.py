"""A directory of the host that was attached to a sandbox while it lives."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attachment:
    """`source` is its path on the host, `target` the one by which it is seen inside."""

    source: str
    target: str
    read_only: bool
