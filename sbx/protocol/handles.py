"""Handles do not survive a fork: the child shares the parent's sockets and event loop."""

import os

from sbx.errors import Broken


def check_process(pid: int, what: str = "sandbox") -> None:
    """Raises Broken `used_after_fork` in any process but `pid`, the one that made the handle."""
    if os.getpid() != pid:
        raise Broken(
            f"this {what} belongs to the process that this one was forked from",
            code="used_after_fork",
            hint=f"make the {what} in the process that uses it",
        )
