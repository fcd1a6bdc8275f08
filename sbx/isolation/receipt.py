"""Which walls are truly in force around one live kernel: read back from linux, not from the plan.

What linux says of the processes (ids, capabilities, no_new_privs, seccomp, namespaces) comes from
the broker, which reads it on the host. Landlock shows in no file: its ABI is the word of our own
guest, given before any user code ran. A plan that was not carried out is refused here.
"""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from sbx.errors import CannotEnforce
from sbx.isolation.plan import LaunchPlan
from sbx.protocol.receipt import Receipt as Receipt

_SECCOMP_FILTER_MODE = 2


def make_receipt(
    plan: LaunchPlan,
    facts: Mapping[str, Any],
    *,
    landlock_abi: int,
    python: str = "",
    preload_failed: Mapping[str, str] = MappingProxyType({}),
    path: str = "cold",
) -> Receipt:
    """Compare what linux says with what was planned. Raises CannotEnforce naming the layer."""
    pid1, kernel = facts["pid1"], facts["kernel"]
    if kernel is None:
        raise _not_in_force("namespaces", "the kernel process cannot be seen from the host")
    for process in (pid1, kernel):
        if process["uid"] == 0:
            raise _not_in_force("namespaces", "a process inside is uid 0 of the host")
        if process["capabilities"]:
            raise _not_in_force("namespaces", "a process inside has capabilities")
        if not process["no_new_privs"]:
            raise _not_in_force("seccomp", "no_new_privs is not set")
        if process["seccomp"] != _SECCOMP_FILTER_MODE:
            raise _not_in_force("seccomp", "no filter is loaded")
    filters = {"default": plan.filter.sha256}
    if plan.seal.kernel_filter is not None:
        filters["strict"] = plan.seal.kernel_filter.sha256
        if kernel["filters"] < len(filters):
            raise _not_in_force("seccomp", "the kernel lacks its second filter")
    if plan.seal.landlock and landlock_abi < 1:
        raise _not_in_force("landlock", "the guest entered no domain")
    return Receipt(
        path=path,
        host_uid=kernel["uid"],
        namespaces=kernel["namespaces"],
        no_new_privs=True,
        capabilities=0,
        seccomp=filters,
        landlock_abi=landlock_abi,
        network=plan.network,
        limits=facts["limits"],
        walls=tuple(asdict(wall) for wall in plan.walls),
        python=python,
        preload_failed=dict(preload_failed),
    )


def _not_in_force(layer: str, cause: str) -> CannotEnforce:
    return CannotEnforce(
        f"the jail came up without a wall it was to have: {cause}",
        hint="run `sbx doctor`; if it finds nothing, report this",
        details={"layer": layer, "cause": cause},
    )
