"""The share of one jail in the counters that Linux keeps for a user or for the whole machine.

Without separate cgroups or namespaces, all jails of a user and that user's programs on the host
share these counters. A jail of the cold path gets the same share from
`sbx.isolation.broker.spawn`, before bubblewrap starts.
"""

from contextlib import suppress

from sbx.linux import namespaces

# They list and count the keys of the user who has the jail's uid outside.
KEYS = ("/proc/keys", "/proc/key-users")
PTYS_MAX = 64  # of 3,072 that all jails of the machine share
TMPFS_NAMES_MAX = 128 << 10  # each takes 1 KiB of Linux, whatever the size of the tmpfs is
_INOTIFY_INSTANCES = 16  # of 128 for each user, by default
_INOTIFY_WATCHES = 8192  # of at least 8,192, and a million where the memory allows it


def keep_half_of_inotify() -> None:
    """Leave half of this user's inotify instances and watches to programs outside of the caller's
    user namespace, independent of the number of jails in it.

    Best effort, because each jail has its own limit.
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
