"""flock(2): Linux records which open file holds a lock, and releases it when the holder dies."""

import fcntl


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file. Return False if another open file has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
