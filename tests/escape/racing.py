"""A racer: a process that exchanges names in a workspace as fast as linux lets it.

    with racing(conversation.files_path, outside, "directory", "file") as racer:
        …                                   racer.swaps tells how often it was at it

Names are swapped by RENAME_EXCHANGE (renameat2(2)), so each is there at every instant, and what it
stands for is what changes: that is the hardest case for whoever looks first and opens then. Every
swap is undone at once; what the host removes meanwhile is made anew.

    directory   d     ↔ a link to the host's directory, a FIFO, a file, another directory
    file        d/f   ↔ a link to the host's file, a hard link to it (by root), a FIFO, a directory
    depth       d/sub ↔ a link to the host's directory, a directory at another depth
    mounts      uploads, uploads/temparea and uploads/generated ↔ links to the host's directory
    plain       … of all these, without FIFOs and hard links
"""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KINDS = ("directory", "file", "depth")
BEGUN_S = 60.0

_RACER = r"""
import ctypes, mmap, os, shutil, sys
root, out, counter, *kinds = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
count = mmap.mmap(os.open(counter, os.O_RDWR), 8)
os.chdir(root)

def make(at, name):
    'What has this name by default, in the directory fd; of the owner that all has here.'
    if name.endswith('-hard'):
        return os.link(out + '/secret', name, dst_dir_fd=at)
    fresh(at, name)
    os.chown(name, owner.st_uid, owner.st_gid, dir_fd=at, follow_symlinks=False)

def fresh(at, name):
    what = name.rpartition('-')[2]
    if what in ('d', 'other', 'sub', 'temparea', 'generated'):
        os.mkdir(name, dir_fd=at)
        if what in ('d', 'other', 'sub'):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            make(below, 'f')
            if what != 'sub': make(below, 'sub')
            os.close(below)
    elif what == 'uploads':
        os.mkdir(name, dir_fd=at)
    elif what == 'outdir':
        os.symlink(out, name, dir_fd=at)
    elif what == 'outfile':
        os.symlink(out + '/secret', name, dir_fd=at)
    elif what == 'fifo':
        os.mkfifo(name, dir_fd=at)
    else:
        fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644, dir_fd=at)
        os.write(fd, b'inside'); os.close(fd)

shutil.rmtree('pool', ignore_errors=True)
os.makedirs('pool/deep/deeper', exist_ok=True)
top = os.open('.', os.O_RDONLY)
owner = os.fstat(top)
pool = os.open('pool/deep/deeper', os.O_RDONLY)
held = {}

def real(*names):
    'The fd of a directory of ours, never of what is swapped in for it.'
    at = top
    for depth, name in enumerate(names):
        key = names[:depth + 1]
        fd = held.get(key)
        if fd is None or os.fstat(fd).st_nlink == 0:
            if fd is not None: os.close(held.pop(key))
            if not there(at, name): make(at, name)
            fd = held[key] = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        at = fd
    return at

def there(at, name):
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
        return True
    except FileNotFoundError:
        return False

SWAPS = {
    'directory': [((), 'd', other) for other in ('outdir', 'fifo', 'file', 'other')],
    'file': [(('d',), 'f', other) for other in ('outfile', 'fifo', 'x-d', 'hard')],
    'depth': [(('d',), 'sub', other) for other in ('outdir', 'other')],
    'mounts': [((), 'uploads', 'outdir'), (('uploads',), 'temparea', 'outdir'),
               (('uploads',), 'generated', 'outdir')],
}
swaps = [(where, name, kind + '-' + other)
         for kind in kinds for where, name, other in SWAPS.get(kind, ())
         if other not in (('fifo', 'hard') if 'plain' in kinds else ())
         if other != 'hard' or os.geteuid() == 0]
done = 0
while True:
    for where, name, other in swaps:
        try:
            at = real(*where)
            for attempt in range(4):
                first = libc.renameat2(at, name.encode(), pool, other.encode(), 2)
                if first: break
                libc.renameat2(at, name.encode(), pool, other.encode(), 2)
                done += 1
            if first:
                for fd, one in ((at, name), (pool, other)):
                    if not there(fd, one): make(fd, one)
        except OSError:
            held.clear()
        count[:8] = done.to_bytes(8, 'little')
"""


@dataclass(frozen=True)
class Racer:
    process: "subprocess.Popen[bytes]"
    counter: mmap.mmap

    @property
    def swaps(self) -> int:
        """How many exchanges there were until now; each was undone."""
        return int.from_bytes(self.counter[:8], "little")


@contextmanager
def racing(root: Path, outside: Path, *kinds: str) -> Iterator[Racer]:
    """While it lasts, names below `root` are exchanged. It has begun when this gives it."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(8)
        counter = mmap.mmap(file.fileno(), 8)
        words = [str(root), str(outside), file.name, *kinds]
        with subprocess.Popen([sys.executable, "-I", "-c", _RACER, *words]) as process:
            try:
                racer = Racer(process, counter)
                end = time.monotonic() + BEGUN_S
                while racer.swaps < 50:
                    assert process.poll() is None, "the racer ended"
                    assert time.monotonic() < end, "the racer does not come to swap anything"
                    time.sleep(0.005)
                yield racer
                assert process.poll() is None, "the racer ended meanwhile"
            finally:
                process.kill()
        counter.close()


def hangs(process: int, counter: mmap.mmap, for_s: float) -> bool:
    """Whether a process that counts its rounds in `counter` made none for so long; it is ended."""
    try:
        last, since = counter[:8], time.monotonic()
        end = since + 30.0
        while time.monotonic() < end:
            if counter[:8] != last:
                last, since = counter[:8], time.monotonic()
            elif time.monotonic() - since > for_s:
                return True
            time.sleep(0.01)
        return False
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
