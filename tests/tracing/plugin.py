"""A plugin of pytest: coverage of sbx by test, in the process of pytest and in all that it starts.

    python -m pytest -p tests.tracing.plugin …       with SBX_COVERAGE_DATA, a directory

coverage.py measures the process of pytest, and `tracer` the others. Each process of xdist runs one
test at a time, and has a directory of its own for the processes that it starts. The arcs in it are
those of the test that has just ended: also of a broker that several tests share. The context of an
arc is the test function, without its parameters.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
from coverage.data import CoverageData

from tests.tracing.tracer import VARIABLE, Tracer

ROOT = Path(__file__).resolve().parents[2]
_ARCS = "arcs"
Table = tuple[str, int, int]  # of a file: path, offset, lines


class Processes:
    """The shared file of one worker, and the data that is read from it."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._data = CoverageData(str(directory / ".coverage"), suffix=f"{worker}.processes")
        place = directory / worker
        place.mkdir(mode=0o755)
        self._tables = _tables()
        _, offset, lines = self._tables[-1]
        files = {path: [offset, lines] for path, offset, lines in self._tables}
        (place / "files.json").write_text(json.dumps(files))
        (place / "outside").write_text(str(place))
        shutil.copy(Path(__file__).with_name("tracer.py"), place)
        self._path = place / _ARCS
        self._path.touch()
        self._path.chmod(0o666)  # each jail has a uid of its own
        os.truncate(self._path, offset + 3 * lines * lines)
        os.environ[VARIABLE] = str(place)
        self.tracer = Tracer(str(place), str(place))

    def drain(self, context: str) -> None:
        """Keep the arcs of the test that has ended, and clear them."""
        arcs = self.tracer.arcs
        found: dict[str, set[tuple[int, int]]] = {}
        tables = iter(self._tables)
        path, offset, lines = next(tables)
        for start, end in _extents(self._path):
            at = arcs.find(b"\x01", start, end)
            while at >= 0:
                arcs[at] = 0
                while at >= offset + 3 * lines * lines:
                    path, offset, lines = next(tables)
                kind, rest = divmod(at - offset, lines * lines)
                one, other = divmod(rest, lines)
                arc = ((one, other), (-one, other), (one, -other))[kind]
                found.setdefault(str(ROOT / "sbx" / path), set()).add(arc)
                at = arcs.find(b"\x01", at + 1, end)
        if found:
            self._data.set_context(context)
            self._data.add_arcs(found)

    def close(self) -> None:
        self._data.close()


def _tables() -> list[Table]:
    tables: list[Table] = []
    offset = 0
    for path in sorted((ROOT / "sbx").rglob("*.py")):
        lines = path.read_bytes().count(b"\n") + 2
        tables.append((str(path.relative_to(ROOT / "sbx")), offset, lines))
        offset += 3 * lines * lines
    return tables


def _extents(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the parts of a sparse file that were ever written to."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = 0
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # ENXIO: there is no more
                return
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            yield start, end


def _traced(args: Any, prefix: str) -> Any:
    """Return the words of a Python that runs a text without site-packages, where the hook of the
    environment is, with `prefix` before the text; all others as they are."""
    if not isinstance(args, list | tuple) or "-c" not in args or str(args[0]) != sys.executable:
        return args
    words = list(args)
    at = words.index("-c")
    if not any("S" in str(word) for word in words[1:at]) or VARIABLE in words[at + 1]:
        return args
    return [*words[: at + 1], f"{prefix}\n{words[at + 1]}", *words[at + 2 :]]


class Measured:
    """The hooks of a process that runs tests."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._coverage = coverage.Coverage(
            data_file=str(directory / ".coverage"), data_suffix=worker, config_file=True
        )
        self._processes = Processes(directory, worker)
        self._coverage.start()
        self._begin_in_children()

    def _begin_in_children(self) -> None:
        """Let forks of this process, and the brokers that it starts, be traced too."""
        tracer = self._processes.tracer
        os.register_at_fork(after_in_child=lambda: sys.settrace(tracer))
        real = subprocess.Popen.__init__

        def started(self: Any, args: Any, *rest: Any, **named: Any) -> None:
            real(self, _traced(args, tracer.prefix()), *rest, **named)

        subprocess.Popen.__init__ = started  # type: ignore[method-assign]
        from sbx.isolation.broker import spawned, watchdog

        spawned._BOOT = f"{tracer.prefix()}; {spawned._BOOT}"
        watchdog._BOOT = f"{tracer.prefix()}; {watchdog._BOOT}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        context = item.nodeid.partition("[")[0]
        self._coverage.switch_context(context)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")
            self._processes.drain(context)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._processes.drain("")
        self._processes.close()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    words = early_config.invocation_params.args
    if worker is None and any(word.startswith(("-n", "--numprocesses")) for word in words):
        return  # the process that only hands the tests out
    directory = Path(os.environ["SBX_COVERAGE_DATA"])
    early_config.pluginmanager.register(Measured(directory, worker or "main"))
