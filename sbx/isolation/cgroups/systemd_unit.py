"""A service of systemd's makes room for its broker in the unit's own group.

A group of cgroup v2 that hands controllers down may hold no process, so while the service itself
sits in its unit's group the broker has to ask systemd for a scope beside it: and what the unit
limits (MemoryMax=, TasksMax=) would not hold for any jail, nor would the unit show them.
"""

import os

from sbx.isolation.cgroups import controlfile, groups
from sbx.isolation.cgroups.probe import LEAF, CgroupCapabilities, probe

_DELEGATED = "user.delegate"  # an extended attribute; systemd.resource-control(5), Delegate=
_WANTED = {"memory", "tasks", "cpu"}


def move_to_leaf_cgroup() -> str | None:
    """Move this process, where it is the only one of a group that systemd delegated, into a leaf
    below it, as a broker does. The leaf; None where everything stays as it is.

    To be called before a broker is started.
    """
    found = probe()
    if not _only_our_process(found):
        return None
    group = f"{next(iter(found.controllers.values()))}/{groups.runtime_name('service')}"
    leaf = f"{group}/{LEAF}"
    try:
        groups.make([group, leaf])
        controlfile.write(f"{leaf}/cgroup.procs", "0")
    except OSError:  # then the broker gets a scope, as anywhere else
        groups.remove([group], lambda _: None, 0)
        return None
    return leaf


def _only_our_process(found: CgroupCapabilities) -> bool:
    if found.version != 2 or found.at_root or set(found.members) != {os.getpid()}:
        return False
    return found.controllers.keys() >= _WANTED and _is_delegated(found.controllers["memory"])


def _is_delegated(group: str) -> bool:
    """Without Delegate=yes systemd may change what is in the group again. A user's own systemd
    (252, measured) marks nothing, but hands the cpu controller down to whom it delegates only."""
    try:
        return os.getxattr(group, _DELEGATED) == b"1"
    except OSError:
        return os.geteuid() != 0 and os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
