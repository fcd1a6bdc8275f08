"""What linux itself says of the processes of a jail, for the receipt: never what they say.

Read by the broker, or by the runtime where it is allowed to: that spares a turn of the broker.
"""

import functools
from collections.abc import Mapping
from typing import Any

from sbx.linux import procfs


def read(pid1: int, kernel: int | None) -> dict[str, Any]:
    """Ids, capabilities, seccomp of both; namespaces of the kernel, in which PID 1 is, too.

    Raises OSError when one of them is gone, or may not be looked into.
    """
    return {
        "pid1": procfs.credentials(pid1)._asdict(),
        "kernel": None
        if kernel is None
        else {**procfs.credentials(kernel)._asdict(), "namespaces": procfs.namespaces(kernel)},
    }


@functools.cache
def own_namespaces() -> Mapping[str, int]:
    """Those of this process, which no jail may be in."""
    return procfs.namespaces("self")
