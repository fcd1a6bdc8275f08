"""`sbx serve`, whose monitor of the event loop writes the worst lag to a file: see bench/stalls.py.

offset 0    the worst delay of a timer that is due every 5 ms, in seconds (float64)
offset 8    the length of the stack below, in bytes (uint32)
offset 12   the stack of the loop at its longest stall of more than 30 ms
"""

import mmap
import os
import struct
import sys
import time
from functools import partial

from sbx.aio import LoopMonitor
from sbx.cli import main
from sbx.service import service

FILE = "BENCH_STALLS_FILE"
SIZE = 1 << 16
_PERIOD_S = 0.005
_STALL_S = 0.03


class Record:
    """The file, from either process."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._cpu = 0.0

    def reset(self) -> None:
        self._map[:20] = bytes(20)

    @property
    def worst_s(self) -> tuple[float, float]:
        return struct.unpack_from("dd", self._map)

    @property
    def stack(self) -> str:
        (length,) = struct.unpack_from("I", self._map, 16)
        return self._map[20 : 20 + length].decode(errors="replace")

    def lagged(self, seconds: float) -> None:
        cpu = time.process_time()
        busy, self._cpu = min(seconds, cpu - self._cpu), cpu
        worst, worst_busy = self.worst_s
        struct.pack_into("dd", self._map, 0, max(worst, seconds), max(worst_busy, busy))

    def stalled(self, _seconds: float, stack: str) -> None:
        data = stack.encode()[-(SIZE - 20) :]
        self._map[20 : 20 + len(data)] = data
        struct.pack_into("I", self._map, 16, len(data))


if __name__ == "__main__":
    record = Record(os.open(os.environ[FILE], os.O_RDWR))  # before root gives up its rights
    monitor = partial(LoopMonitor, period_s=_PERIOD_S, stall_s=_STALL_S)
    vars(service)["LoopMonitor"] = lambda *_: monitor(record.lagged, record.stalled)
    sys.exit(main())
