"""Where a fork's new objects lie, in a process of its own: what is filled stays so."""

import os
import subprocess
import sys

import pytest

_SPREAD = """
import sys
from sbx.guest.start import memory_layout
holes = [bytes(30) for _ in range(60_000)]
del holes[::40]  # free places, on hundreds of pages
if sys.argv[1] == "filled":
    memory_layout.fill()
new = [bytes(30) for _ in range(1_000)]
print(len({id(one) >> 12 for one in new}))
"""


def _pages(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _SPREAD, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


def test_new_objects_lie_side_by_side_once_the_gaps_are_filled() -> None:
    assert _pages("filled") <= 20  # 1,000 times 64 bytes are 16 pages
    assert _pages("as they are") > 100


_COLLAPSED = """
import re
from sbx.guest.start import memory_layout
kept = bytearray(b"x" * (16 << 20))  # an mmap of its own, seven huge pages at least
memory_layout.collapse()
sizes = re.findall(r"AnonHugePages: +(\\d+) kB", open("/proc/self/smaps").read())
print(sum(map(int, sizes)) // 2048, set(kept) == {ord("x")})
"""


def test_memory_is_put_into_huge_pages_and_keeps_what_is_in_it() -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("MADV_COLLAPSE came with linux 6.1")
    done = subprocess.run(
        [sys.executable, "-c", _COLLAPSED], capture_output=True, text=True, check=True, timeout=60
    )
    count, same = done.stdout.split()
    assert same == "True"
    assert int(count) >= 7
