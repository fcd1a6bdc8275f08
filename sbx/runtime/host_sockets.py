"""Refuse a start that would show code a socket of the host which nothing covers."""

import os

from sbx.errors import Denied
from sbx.isolation import masking
from sbx.isolation.launch_plan import Bind, LaunchPlan


def refuse_uncovered(plan: LaunchPlan) -> None:
    """Raise Denied `host_socket` for a socket or FIFO in a directory of the host, where the broker
    has no power over mounts and so cannot cover it. Blocks while it looks for one."""
    if plan.masks or plan.unix_sockets != "own":
        return
    for mount in (*plan.mounts, *plan.own_mounts):
        if isinstance(mount, Bind) and mount.target in plan.host_directories:
            _refuse_below(mount.source)


def _refuse_below(source: str) -> None:
    top = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        limits = masking.MaskingLimits()
        found = masking.find(top, limits)
    finally:
        os.close(top)
    if found:
        path = f"{source}/{os.fsdecode(found[0])}"
        raise _denied(f"{path!r} is a socket or FIFO of the host", path)
    if not limits.complete:
        raise _denied(
            f"{source!r} may hold sockets of the host, and is too large to look for them", source
        )


def _denied(problem: str, path: str) -> Denied:
    return Denied(
        f"{problem}, and this host gives sbx no mount namespace in which to cover it",
        code="host_socket",
        hint='remove it, or use a policy with unix_sockets = "none"; `sbx doctor` names the cause',
        details={"path": path},
    )
