"""flock(2): who holds a file is told by linux, and let go of when the holder dies."""

import fcntl


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file; False when another open file has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
