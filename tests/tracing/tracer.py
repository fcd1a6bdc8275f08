"""Record which lines and branches of sbx run in a process that coverage.py cannot measure.

The broker runs without site-packages, and the guest runs where it can write no file. Both may be
killed at any moment. So each process maps one shared file into its memory before the lockdown, and
writes one byte for each arc, a step from one line to another. `plugin` reads the bytes after each
test and clears them. A mapping survives fork, Landlock, a filter and another uid.

    host       `sbx_coverage.pth` runs this file in each Python whose environment has VARIABLE
    broker     the boot code of `launch` and `watchdog` gets a prefix that runs this file
    guest      the command of each bwrap is preceded by this file, and its view gets DIRECTORY

This file is run by `exec` and imports only what the guest has loaded anyway.

    files.json    {path below sbx: [offset, lines]}; of each file three tables of lines x lines
    arcs          the tables: steps between lines, from the start of a function, to its end
"""

import json
import mmap
import os
import sys
from collections.abc import Callable
from opcode import opmap
from types import CodeType, FrameType
from typing import Any

INSIDE = "/opt/sbx-coverage"
VARIABLE = "COVERAGE_OF_SBX"  # tests take those away that begin with SBX_
RESUME = opmap["RESUME"]

Local = Callable[[FrameType, str, Any], Any]
_Place = tuple[int, int, int, bytes]  # offset, lines, first line, instructions

_START = f"import os; os.environ[{VARIABLE!r}] = %r; exec(open(%r).read(), {{}})"
_GUEST = (
    f"import os; os.environ[{VARIABLE!r}] = {INSIDE!r}; exec(open({INSIDE + '/tracer.py'!r})"
    f".read(), {{}}); del os.environ[{VARIABLE!r}]; import sys; p = sys.argv[1];"
    " exec(compile(open(p).read(), p, 'exec'), {'__name__': '__main__', '__file__': p})"
)


class Tracer:
    """The trace function of a process. `directory` is the one of its worker, as the process sees
    it; `outside` is its path on the host."""

    def __init__(self, directory: str, outside: str) -> None:
        self._directory = directory
        self._outside = outside
        with open(f"{directory}/files.json", encoding="utf-8") as file:
            self._files: dict[str, list[int]] = json.load(file)
        self._places: dict[CodeType, _Place | None] = {}
        before = set(os.listdir("/proc/self/fd"))
        fd = os.open(f"{directory}/arcs", os.O_RDWR | os.O_CLOEXEC)
        self.arcs = self._arcs = mmap.mmap(fd, 0)
        os.close(fd)
        # mmap keeps a copy of the descriptor, which the checks of the zygote would meet.
        for number in set(os.listdir("/proc/self/fd")) - before:
            try:
                os.close(int(number))
            except OSError:
                continue

    def __call__(self, frame: FrameType, event: str, arg: object) -> Local | None:
        code = frame.f_code
        try:
            place = self._places[code]
        except KeyError:
            place = self._places[code] = self._place(code)
        if place is None:
            return None
        return self._local(frame, *place)

    def _place(self, code: CodeType) -> "_Place | None":
        _, found, below = code.co_filename.rpartition("/sbx/")
        place = self._files.get(below) if found else None
        return None if place is None else (place[0], place[1], code.co_firstlineno, code.co_code)

    def _local(self, frame: FrameType, offset: int, lines: int, first: int, code: bytes) -> Local:
        """Return the trace function of one call, or of one part of a generator's life."""
        arcs, size = self._arcs, lines * lines
        last = frame.f_lineno if code[frame.f_lasti + 1] else 0  # 0: it has just begun

        def local(frame: FrameType, event: str, arg: object) -> Local:
            nonlocal last
            if event == "line":
                line = frame.f_lineno
                if last:
                    arcs[offset + last * lines + line] = 1
                else:
                    arcs[offset + size + first * lines + line] = 1
                last = line
            elif event == "return":
                at = frame.f_lasti + 2
                if last and (len(code) <= at or code[at] != RESUME):
                    arcs[offset + 2 * size + last * lines + first] = 1
                if frame.f_code.co_name == "<module>":
                    self._loaded(frame)
            return local

        return local

    def _loaded(self, frame: FrameType) -> None:
        """Let a module that starts processes start them with this file."""
        names = frame.f_globals
        match names.get("__name__"):
            case "sbx.isolation.broker.process" | "sbx.isolation.broker.watchdog":
                names["_BOOT"] = f"{self.prefix()}; {names['_BOOT']}"
            case "sbx.isolation.broker.spawn":
                names["_start_bwrap"] = self._into_guests(names["_start_bwrap"])

    def prefix(self) -> str:
        """Return code for a Python that has neither this environment nor site-packages."""
        return _START % (self._outside, f"{self._outside}/tracer.py")

    def _into_guests(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def traced(name: str, order: dict[str, Any], *args: Any, **named: Any) -> Any:
            if len(order["command"]) != 3:  # a test lets something else start
                return start(name, order, *args, **named)
            words = list(order["args"])
            at = words.index("--remount-ro")
            words[at:at] = ["--bind", self._outside, INSIDE]
            python, isolated, script = order["command"]
            command = [python, isolated, "-c", _GUEST, script]
            return start(name, {**order, "args": words, "command": command}, *args, **named)

        return traced


def begin() -> Tracer:
    """Trace this process, and all that it forks, from now on."""
    directory = os.environ[VARIABLE]
    with open(f"{directory}/outside", encoding="utf-8") as file:
        tracer = Tracer(directory, file.read())
    sys.settrace(tracer)
    if "threading" in sys.modules:
        sys.modules["threading"].settrace(tracer)
    return tracer


if __name__ == "builtins":  # run by `exec` in an empty namespace
    begin()
