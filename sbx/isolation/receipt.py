"""The walls that are in force around one live kernel: read back from Linux, not from the plan.

The broker reads the facts about the processes (ids, capabilities, no_new_privs, seccomp,
namespaces) on the host. No file shows Landlock: our guest reports its ABI before user code runs.
The hashes are those of the loaded programs; Linux reports their number only. A kernel that does not
match its plan is refused here. `make_receipt` is for the start. `read_again` is for a live kernel:
it refuses nothing, and reports the changes.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from msgspec.structs import asdict

from sbx.errors import CannotEnforce
from sbx.isolation.launch_plan import LaunchPlan, Wall
from sbx.isolation.masking import Masks
from sbx.protocol.receipt import Receipt as Receipt

_SECCOMP_FILTER_MODE = 2
_CONNECTIONS_SINCE = 9  # the ABI of Landlock with a rule for Unix sockets
_READ = (
    "host_uid",
    "namespaces",
    "no_new_privs",
    "capabilities",
    "seccomp_mode",
    "filters",
    "limits",
)


def make_receipt(
    plan: LaunchPlan,
    facts: Mapping[str, Any],
    *,
    host: Mapping[str, int],
    landlock_abi: int,
    masks: Masks | None = None,
    read_at: float = 0.0,
    python: str = "",
    preload_failed: Mapping[str, str] = MappingProxyType({}),
    path: str = "cold",
) -> Receipt:
    """Compare the facts with the plan. Raise CannotEnforce, which names the layer.

    `host`: the namespaces of the runtime. The kernel must be in none of them.
    """
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
    for name, number in kernel["namespaces"].items():
        if number == host.get(name):
            raise _not_in_force("namespaces", f"the kernel is in the {name} namespace of the host")
    filters = {"default": plan.filter.sha256}
    if plan.seal.jail_filter is not None:
        filters["allowlist"] = plan.seal.jail_filter.sha256
        if pid1["filters"] < len(filters):
            raise _not_in_force("seccomp", "PID 1 lacks its second filter")
    if plan.seal.kernel_filter is not None:
        filters["strict"] = plan.seal.kernel_filter.sha256
        if kernel["filters"] < len(filters):
            raise _not_in_force("seccomp", "the kernel lacks its second filter")
    if plan.seal.last_filter is not None:
        filters[plan.seal.last_filter.name] = plan.seal.last_filter.sha256
        if kernel["filters"] < len(filters):
            raise _not_in_force("seccomp", "the kernel lacks its last filter")
    if plan.masks and masks is None:
        raise _not_in_force("unix_sockets", "the sockets of the host are not covered")
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
        walls=tuple(asdict(w) for w in (*plan.walls, unix_sockets(plan, landlock_abi, masks))),
        python=python,
        preload_failed=dict(preload_failed),
        host_namespaces=dict(host),
        seccomp_mode=kernel["seccomp"],
        filters=kernel["filters"],
        read_at=read_at,
    )


def unix_sockets(plan: LaunchPlan, landlock_abi: int, masks: Masks | None) -> Wall:
    """Return the wall against Unix sockets and FIFOs of the host at this start.

    It is weaker if only its mode protects a socket that is left, or may appear later.
    """
    demanded = plan.unix_sockets
    if demanded == "any":
        return Wall("unix_sockets", demanded, "nothing: the policy allows the host's")
    means = []
    if demanded == "none":
        means.append("seccomp: no Unix socket but pairs")
    by_landlock = plan.seal.landlock and landlock_abi >= _CONNECTIONS_SINCE
    if by_landlock:
        means.append("Landlock: connections to the jail's own")
    if masks is not None:
        means.append(
            f"masks: {masks.masked} sockets and FIFOs" + ("" if masks.complete else ", not all")
        )
    elif not plan.host_directories:
        means.append("no directory of the host is shown")
    elif demanded == "own":
        means.append("looked for at the start: none there")  # an existing one was refused
    else:
        means.append("FIFOs are not covered")
    away = by_landlock or (demanded == "none" and masks is not None)
    weaker = bool(plan.host_directories) and not away
    return Wall("unix_sockets", demanded, "; ".join(means), weaker)


def read_again(
    standing: Receipt, facts: Mapping[str, Any], *, host: Mapping[str, int], read_at: float
) -> Receipt:
    """Return the receipt of a kernel that started with `standing`, by the facts of now.

    Each value is that of PID 1 or of the kernel, whichever has the weaker wall.
    """
    processes = [facts["pid1"], facts["kernel"]]
    now = replace(
        standing,
        host_uid=facts["kernel"]["uid"],
        namespaces=facts["kernel"]["namespaces"],
        no_new_privs=all(process["no_new_privs"] for process in processes),
        capabilities=processes[0]["capabilities"] | processes[1]["capabilities"],
        seccomp_mode=min(process["seccomp"] for process in processes),
        filters=facts["kernel"]["filters"],
        limits=facts["limits"],
        host_namespaces=dict(host),
        read_at=read_at,
    )
    changed = {
        name: {"was": getattr(standing, name), "now": getattr(now, name)}
        for name in _READ
        if getattr(standing, name) != getattr(now, name)
    }
    if facts.get("in_group") is False:
        changed["in_group"] = {"was": True, "now": False}
    return replace(now, changed=changed)


def _not_in_force(layer: str, cause: str) -> CannotEnforce:
    return CannotEnforce(
        f"the jail started without a planned wall: {cause}",
        hint="run `sbx doctor`; if it finds nothing, report this",
        details={"layer": layer, "cause": cause},
    )
