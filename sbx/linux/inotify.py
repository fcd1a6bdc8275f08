"""inotify(7): Linux reports changes in directories, whichever process makes them.

One `Inotify` is one queue with many watches. A watch belongs to the inode that was passed to `add`
and follows it through renames. The caller must remember the location of the directory. When the
queue is full, Linux drops events and adds one event with OVERFLOW. Events of one directory arrive
in order.

    EMFILE  this user has fs.inotify.max_user_instances queues open already
    ENOSPC  this user has fs.inotify.max_user_watches watches already
"""

import os
import struct
from dataclasses import dataclass

from sbx.linux import libc
from sbx.linux.descriptors import OwnedDescriptor

MODIFY = 0x002
MOVED_FROM = 0x040
MOVED_TO = 0x080
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
OVERFLOW = 0x4000
IGNORED = 0x8000  # the watch has ended: it was removed, or its directory was
ONLYDIR = 0x1000000
EXCL_UNLINK = 0x4000000
IS_DIRECTORY = 0x40000000

_HEAD = struct.Struct("=iIII")
_READ = 64 << 10


@dataclass(frozen=True, slots=True)
class Event:
    """`name` is the entry of the watched directory. It is empty for the directory itself."""

    watch: int
    mask: int
    name: bytes


class Inotify(OwnedDescriptor):
    """A queue of events. `fd` is readable while the queue has events. Reading never blocks."""

    def __init__(self) -> None:
        super().__init__(libc.call("inotify_init1", os.O_CLOEXEC | os.O_NONBLOCK))

    def add(self, directory: int, mask: int) -> int:
        """Watch the directory of the fd `directory` (O_PATH is enough); return the watch.

        The same inode always gets the same watch. The call uses the magic link of the fd in /proc,
        so an attacker cannot swap a name in between.
        """
        path = f"/proc/self/fd/{directory}".encode()
        return libc.call("inotify_add_watch", self.fd, path, mask | ONLYDIR)

    def remove(self, watch: int) -> None:
        """Remove a watch. Raise OSError (EINVAL) if it has ended already."""
        libc.call("inotify_rm_watch", self.fd, watch)

    def read(self) -> list[Event]:
        """Return the events of one read of the queue; an empty list if the queue is empty."""
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
