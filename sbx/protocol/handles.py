"""Refuse handles after a fork: the child shares the parent's sockets and event loop."""

import os

from sbx.errors import Broken


def check_process(pid: int, what: str = "sandbox") -> None:
    """Raise Broken `used_after_fork` unless this is the process `pid`, which created the handle."""
    if os.getpid() != pid:
        raise Broken(
            f"this {what} belongs to the process from which this process was forked",
            code="used_after_fork",
            hint=f"create the {what} in the process that uses it",
        )
