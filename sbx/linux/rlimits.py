"""How many files a process may open: setrlimit(2), RLIMIT_NOFILE."""

import resource


def raise_open_files(most: int) -> int:
    """Raise the limit of this process to its hard limit, to `most` at the most, and return the
    limit. Many hosts set 1024, for select(2). Jails have a limit of their own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
