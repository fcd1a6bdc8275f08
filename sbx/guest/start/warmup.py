"""Cells that a shell runs before the user's, so that the first one finds everything prepared.

Without them, the first `1+1` after a fork takes 5.7 ms instead of 0.4: the interpreter specialises
the code, caches fill, and every memory page that a cell writes to is copied (Python writes wherever
it counts a reference).
"""

import contextlib
import gc
import io
import linecache
import sys
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any

from sbx.guest import frames

if TYPE_CHECKING:
    from sbx.guest.kernel.shell import SandboxShell

_CELLS = (
    "1+1",
    "warm = [1.5, 'a', {'b': (None, True)}]",
    "print('warm', 1)",
    "import json\nfor warm in range(2):\n    print(warm)\n[warm]",
    "display(warm)",
    "1+1",
)
_FAILING_CELL = "def warm():\n    return 1/0\nwarm()"
_MISSING = object()
_LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")


def warm(shell: "SandboxShell", *, failing: bool = False) -> None:
    """Run a few representative cells on a shell that is not attached.

    `failing` adds a cell that raises, for a zygote. Showing an error reads every loaded module. In
    a fork that copies 3 MB in 15 ms, more than all the rest, and most forks never need it.

    The cells leave no trace in variables, history, counters or errors. They start no thread, write
    no file, and collect no garbage: in a fork, a collection would copy pages for nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _leaving_no_trace(shell), _into_nowhere(shell):
            for code in (*_CELLS, _FAILING_CELL) if failing else _CELLS:
                _run(shell, code)
    finally:
        if collecting:
            gc.enable()


def _run(shell: "SandboxShell", code: str) -> None:
    """Run a cell like the loop of the kernel. No cell here awaits: it ends at its first step."""
    shell.begin_cell()
    transformed = shell.transform_cell(code)
    cell = shell.run_cell_async(code, store_history=True, transformed_cell=transformed)
    with contextlib.suppress(StopIteration):
        cell.send(None)
    cell.close()
    shell.payload_manager.clear_payload()  # type: ignore[union-attr]


@contextlib.contextmanager
def _into_nowhere(shell: "SandboxShell") -> Iterator[None]:
    """Build frames as for a user's cell, and drop them."""

    def publish(kind: str, content: Mapping[str, Any], hold: bool) -> None:
        frames.encode(kind, content)

    shell.publish_by(publish)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        shell.publish_by(None)


@contextlib.contextmanager
def _leaving_no_trace(shell: "SandboxShell") -> Iterator[None]:
    history: Any = shell.history_manager
    owners = (shell, shell.displayhook, shell.compile, shell.InteractiveTB, history)
    # The values of traits are in the dictionary `_trait_values`, one level down.
    maps: list[MutableMapping[Any, Any]] = [vars(owner) for owner in owners]
    maps += [vars(owner).get("_trait_values", {}) for owner in owners]
    maps += [shell.user_ns, shell.user_ns_hidden, shell.user_ns["_oh"], linecache.cache]
    maps += [history.outputs, history.exceptions, history.output_hist_reprs]
    maps += [shell.compile._filename_map]
    lists: list[MutableSequence[Any]] = [history.input_hist_parsed, history.input_hist_raw]
    lists += [history.db_input_cache, history.db_output_cache]
    kept_maps = [dict(mapping) for mapping in maps]
    kept_lengths = [len(mapping) for mapping in lists]
    last_error = {name: getattr(sys, name, _MISSING) for name in _LAST_ERROR}
    try:
        yield
    finally:
        for mapping, kept in zip(maps, kept_maps, strict=True):
            mapping.clear()
            mapping.update(kept)
        for sequence, length in zip(lists, kept_lengths, strict=True):
            del sequence[length:]
        for name, value in last_error.items():
            if value is not _MISSING:
                setattr(sys, name, value)
            elif hasattr(sys, name):
                delattr(sys, name)
