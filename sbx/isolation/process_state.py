"""The facts that Linux reports about the processes of a jail, for the receipt.

The processes themselves are not asked. The broker reads the facts, or the runtime if it may: that
saves a turn of the broker.
"""

import functools
from collections.abc import Mapping
from typing import Any

from sbx.linux import procfs


def read(pid1: int, kernel: int | None) -> dict[str, Any]:
    """Return ids, capabilities and seccomp of both, and the namespaces of the kernel, which are
    those of PID 1, too.

    Raise OSError if one of them is gone, or may not be inspected.
    """
    return {
        "pid1": procfs.credentials(pid1)._asdict(),
        "kernel": None
        if kernel is None
        else {**procfs.credentials(kernel)._asdict(), "namespaces": procfs.namespaces(kernel)},
    }


@functools.cache
def own_namespaces() -> Mapping[str, int]:
    """Return the namespaces of this process. No jail may be in them."""
    return procfs.namespaces("self")
