"""The limit of open files of a process: setrlimit(2), RLIMIT_NOFILE."""

import resource


def raise_open_files(maximum: int) -> int:
    """Raise the soft limit of this process to its hard limit, but at most to `maximum`; return the
    limit.

    Many hosts set a soft limit of 1024 because of select(2). Jails have their own limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = maximum if hard == resource.RLIM_INFINITY else min(hard, maximum)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
