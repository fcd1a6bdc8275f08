"""The share of one jail in what Linux counts for a user or for the whole machine.

Without cgroups or namespaces of their own, these counters are common to all jails of a user and to
the programs of that user on the host. A jail of the cold path gets the same share from
`sbx.isolation.spawn`, before bubblewrap starts.
"""

from contextlib import suppress

from sbx.linux import namespaces

PTYS_MAX = 64  # of 3,072 that all jails of the machine share
_INOTIFY_INSTANCES = 16  # of 128 for each user, by default
_INOTIFY_WATCHES = 8192  # of at least 8,192, and a million where the memory allows it


def keep_half_of_inotify() -> None:
    """Leave half of the inotify instances and watches of this user to programs outside of the
    caller's user namespace, however many jails there are in it.

    Best effort, since each jail has a limit of its own.
    """
    with suppress(OSError):
        namespaces.limit_inotify(
            instances=_read("/proc/sys/fs/inotify/max_user_instances") // 2,
            watches=_read("/proc/sys/fs/inotify/max_user_watches") // 2,
        )


def _read(path: str) -> int:
    with open(path, encoding="ascii") as number:
        return int(number.read())


def limit_inotify() -> None:
    """Limit inotify in the caller's own user namespace, which no other jail may use."""
    namespaces.limit_inotify(instances=_INOTIFY_INSTANCES, watches=_INOTIFY_WATCHES)
