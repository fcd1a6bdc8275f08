"""Read a small text file of the user: a configuration, a hook."""

import os
import stat

from sbx.linux.descriptors import closing

SMALL_MAX = 256 << 10


def read_small(path: str, most: int = SMALL_MAX) -> str:
    """Return the first `most` bytes. Do not wait for a FIFO. Raises OSError, ValueError."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device can have an effect
        raise ValueError(f"{path} is not a regular file")
    with closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is not a regular file")
        return os.read(fd, most).decode(errors="replace")
