"""Files that occupy memory or disk space and have no name, seen by proc(5).

A process holds them by a descriptor, a mapping, or as its program. They can also wait in a Unix
socket (SCM_RIGHTS): then no process shows them, only their number.
"""

import os
import stat
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from sbx.linux import procfs

_SHARED = b" /dev/zero (deleted)\n"  # mmap(2) with MAP_SHARED and MAP_ANONYMOUS


class Unlinked(NamedTuple):
    """Files without a name that processes hold: they occupy disk space, and no walk of the
    directories finds them.

    `hidden` is the number of places that may hold more, of a size that the caller cannot read:
    descriptors in flight, mappings of removed files (Linux shows their size to root alone), files
    that may be in another subvolume of btrfs, and processes that hide their files.
    """

    bytes: int
    files: int
    hidden: int = 0


def unlinked(pid: int, device: int, deadline: float) -> tuple[dict[int, int], int]:
    """Return the bytes of each open, mapped or executed regular file without a name, by inode
    number, and the number of `Unlinked.hidden` places.

    Only files of the file system `device` count. The search stops at `deadline` (time.monotonic).
    Raise PermissionError if the process hides its files from the caller.
    """
    sizes: dict[int, int] = {}
    hidden = 0
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return sizes, hidden
    for path in ("exe", *(f"fd/{name}" for name in names)):
        if time.monotonic() > deadline:
            return sizes, hidden
        with suppress(OSError):
            file = os.stat(f"/proc/{pid}/{path}")
            if stat.S_ISSOCK(file.st_mode):
                hidden += procfs.count_in_flight(pid, path[3:])
            elif not file.st_nlink and stat.S_ISREG(file.st_mode):
                if file.st_dev == device:
                    sizes[file.st_ino] = file.st_blocks * 512
                elif os.major(file.st_dev) == os.major(device) == 0:  # or a subvolume of btrfs
                    hidden += 1
    for path, inode in _deleted_maps(pid, device, deadline):
        try:
            file = os.stat(f"/proc/{pid}/{path}")
        except PermissionError:
            hidden += inode not in sizes
        except OSError:
            continue
        else:
            if not file.st_nlink and file.st_dev == device and stat.S_ISREG(file.st_mode):
                sizes[file.st_ino] = file.st_blocks * 512
    return sizes, hidden


def _deleted_maps(pid: int, device: int, deadline: float) -> Iterator[tuple[str, int]]:
    """Yield the entries of `map_files` whose file has lost its name, and its inode number, until
    the deadline.

    Linux marks their paths in `maps`. To read that takes 0.9 ms for 560 mappings of a process with
    pandas; a stat(2) of each mapping took 2.3 ms. btrfs and overlayfs show another device there
    than stat(2) does, so any unnamed device may be the one.
    """
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb", buffering=1 << 16) as lines:
        for line in lines:
            if time.monotonic() > deadline:
                return
            if line.endswith(b" (deleted)\n"):
                addresses, _, _, number, inode, path = line.split(None, 5)
                start, end = addresses.split(b"-")
                major, minor = (int(part, 16) for part in number.split(b":"))
                if os.makedev(major, minor) == device or (
                    major == os.major(device) == 0
                    and not path.startswith((b"/memfd:", b"/SYSV", b"/dev/"))
                ):
                    yield f"map_files/{int(start, 16):x}-{int(end, 16):x}", int(inode)


def unlinked_of(
    pids: Sequence[int], device: int, at_most_s: float, *, count_hidden: bool = False
) -> Unlinked:
    """Return the `unlinked` files of many processes.

    The search starts at a random process, so that repeated calls examine different processes if
    there are too many for the time limit. If one of them hides its files from the caller, raise
    PermissionError, or with `count_hidden` count it.
    """
    deadline = time.monotonic() + at_most_s
    begin = int.from_bytes(os.urandom(2)) % max(1, len(pids))
    sizes: dict[int, int] = {}
    hidden = 0
    for pid in (*pids[begin:], *pids[:begin]):
        if time.monotonic() > deadline:
            break
        try:
            files, places = unlinked(pid, device, deadline)
        except PermissionError:
            if not is_hidden(pid):
                continue  # it has ended meanwhile
            if not count_hidden:
                raise
            hidden += 1
        else:
            sizes |= files
            hidden += places
    return Unlinked(sum(sizes.values()), len(sizes), hidden)


def maps_nameless(pid: int, seen: Container[int]) -> tuple[bool, int]:
    """Return whether a process maps memory of a size that it does not show, and how much of that is
    resident: a memfd other than those `seen` (inode numbers), or shared memory without a file.

    Only the pages that its page tables have count as resident. madvise(2) and munmap(2) take
    others out of these tables, and they stay.
    """
    maps_memfd = maps_shared = False
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb", buffering=1 << 16) as lines:
        for line in lines:
            maps_memfd |= b" /memfd:" in line and int(line.split()[4]) not in seen
            maps_shared |= line.endswith(_SHARED)
    return maps_memfd or maps_shared, _resident_in_shared(pid) if maps_shared else 0


def _resident_in_shared(pid: int) -> int:
    resident, is_shared = 0, False
    with suppress(OSError), open(f"/proc/{pid}/smaps", "rb", buffering=1 << 16) as lines:
        for line in lines:
            if line[:1].islower() or line[:1].isdigit():  # the addresses of a mapping
                is_shared = line.endswith(_SHARED)
            elif is_shared and line.startswith(b"Pss:"):
                resident += int(line.split()[1]) << 10
    return resident


def is_hidden(pid: int) -> bool:
    """Return whether a process that lives hides its files from the caller (PR_SET_DUMPABLE,
    execve(2) of an unreadable file). A process without memory has ended."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        with suppress(OSError):
            return "VmRSS" in procfs.status(pid)
    except OSError:
        pass
    return False
