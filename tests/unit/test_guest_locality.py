"""Where a fork's new objects lie, in a process of its own: what is filled stays so."""

import subprocess
import sys

_SPREAD = """
import sys
from sbx.guest import locality
holes = [bytes(30) for _ in range(60_000)]
del holes[::40]  # free places, on hundreds of pages
if sys.argv[1] == "filled":
    locality.fill()
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
