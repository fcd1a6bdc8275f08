"""inotify(7): linux tells what changes in directories, by their inodes, whoever changes them.

One `Inotify` is one queue with many watches. A watch is of the inode that `add` was given, under
whatever name it goes later; where it lies is for the caller to remember. What the queue cannot hold
is lost, which an event with OVERFLOW says. Events of one directory come in their order.

    EMFILE  fs.inotify.max_user_instances queues of this user are open already
    ENOSPC  fs.inotify.max_user_watches watches are
"""

import os
import struct
from dataclasses import dataclass

from sbx.linux import libc

MODIFY = 0x002
ATTRIB = 0x004
CLOSE_WRITE = 0x008
MOVED_FROM = 0x040
MOVED_TO = 0x080
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
UNMOUNT = 0x2000
OVERFLOW = 0x4000
IGNORED = 0x8000  # the watch is gone: removed, or its directory was
ONLYDIR = 0x1000000
EXCL_UNLINK = 0x4000000
IS_DIRECTORY = 0x40000000

_HEAD = struct.Struct("=iIII")
_READ = 64 << 10


@dataclass(frozen=True, slots=True)
class Event:
    """`name` is of the entry in the watched directory; empty for the directory itself."""

    watch: int
    mask: int
    name: bytes


class Inotify:
    """A queue; `fd` becomes readable when there is something in it, and never blocks."""

    def __init__(self) -> None:
        self.fd = libc.call("inotify_init1", os.O_CLOEXEC | os.O_NONBLOCK)

    def add(self, directory: int, mask: int) -> int:
        """Watch the directory that the fd `directory` holds (O_PATH will do); its watch, which is
        the same one for the same inode. By the fd's magic link: no name can be swapped.
        """
        path = f"/proc/self/fd/{directory}".encode()
        return libc.call("inotify_add_watch", self.fd, path, mask | ONLYDIR)

    def remove(self, watch: int) -> None:
        """Raises OSError (EINVAL) for one that is gone already."""
        libc.call("inotify_rm_watch", self.fd, watch)

    def read(self) -> list[Event]:
        """What is in the queue now, as much as one read takes; nothing where it is empty."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return []
        events = []
        position = 0
        while position < len(data):
            watch, mask, _, length = _HEAD.unpack_from(data, position)
            position += _HEAD.size
            name = data[position : position + length].rstrip(b"\0")
            position += length
            events.append(Event(watch, mask, name))
        return events

    def close(self) -> None:
        """A second time does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
