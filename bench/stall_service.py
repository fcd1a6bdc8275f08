"""`sbx serve`, whose monitor of the event loop writes the worst lag to a file: see bench/stalls.py.

offset 0    the worst delay of a timer that is due every 5 ms, in seconds (float64)
offset 8    the CPU time of the service in the delay that has most of it (float64)
offset 16   the longest garbage collection (float64)
offset 24   the length of the stacks below, in bytes (uint32)
offset 28   the stack of the loop at its last stall of more than 30 ms, and those of other threads:
            one of them may have kept the interpreter lock
"""

import gc
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from functools import partial

from sbx.aio import LoopMonitor
from sbx.cli import main
from sbx.service import service

FILE = "BENCH_STALLS_FILE"
SIZE = 1 << 16
_PERIOD_S = 0.005
_STALL_S = 0.03
_FRAMES = 6  # of each other thread
_WORST = struct.Struct("ddd")
_LENGTH = struct.Struct("I")
_STACKS = _WORST.size + _LENGTH.size


class Record:
    """The file, from either process."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._cpu = self._began = 0.0

    def reset(self) -> None:
        self._map[:_STACKS] = bytes(_STACKS)

    @property
    def worst_s(self) -> tuple[float, float, float]:
        return _WORST.unpack_from(self._map)

    @property
    def stack(self) -> str:
        (length,) = _LENGTH.unpack_from(self._map, _WORST.size)
        return self._map[_STACKS : _STACKS + length].decode(errors="replace")

    def lagged(self, seconds: float) -> None:
        cpu = time.process_time()
        busy, self._cpu = min(seconds, cpu - self._cpu), cpu
        lag, worst_busy, collection = self.worst_s
        _WORST.pack_into(self._map, 0, max(lag, seconds), max(worst_busy, busy), collection)

    def collecting(self, phase: str, _info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
            return
        *lags, collection = self.worst_s
        _WORST.pack_into(self._map, 0, *lags, max(collection, now - self._began))

    def stalled(self, _seconds: float, stack: str) -> None:
        names = {each.ident: each.name for each in threading.enumerate()}
        stacks = [
            f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame)[-_FRAMES:])}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        ]
        data = "\n".join((stack, *stacks)).encode()[: SIZE - _STACKS]
        self._map[_STACKS : _STACKS + len(data)] = data
        _LENGTH.pack_into(self._map, _WORST.size, len(data))


if __name__ == "__main__":
    record = Record(os.open(os.environ[FILE], os.O_RDWR))  # before root gives up its rights
    gc.callbacks.append(record.collecting)
    monitor = partial(LoopMonitor, period_s=_PERIOD_S, stall_s=_STALL_S)
    vars(service)["LoopMonitor"] = lambda *_: monitor(record.lagged, record.stalled)
    sys.exit(main())
