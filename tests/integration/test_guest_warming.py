"""A shell that ran a few cells ahead of everybody's cannot be told from one that did not."""

import json
from pathlib import Path
from typing import Any

import pytest
from guest_client import in_python

# What a cell could see or meet of an earlier one, in the shell and around it.
TRACES = """
import gc, json, linecache, os, sys, threading
from sbx.guest.kernel.setup import prepare
from sbx.guest.start.warmup import warm
shell, _ = prepare()

def traces():
    history, hook = shell.history_manager, shell.displayhook
    return {
        'names': {name: repr(value)[:200] for name, value in shell.user_ns.items()},
        'hidden': sorted(shell.user_ns_hidden),
        'count': shell.execution_count,
        'last run': repr([shell.last_execution_succeeded, shell.last_execution_result]),
        'inputs': [history.input_hist_raw, history.input_hist_parsed, history._i, history._i00],
        'outputs': repr([history.outputs, history.exceptions, history.output_hist_reprs]),
        'unders': repr([hook._, hook.__, hook.___, hook.exec_result]),
        'error': sorted(name for name in vars(sys) if name.startswith('last_')),
        'ours': repr([shell.last_error, shell.error_in_display, shell._publish, shell.kernel]),
        'traceback': repr([getattr(shell.InteractiveTB, 'tb', 0)]),
        'payload': shell.payload_manager.read_payload(),
        'sources': sorted(linecache.cache),
        'hooks': repr([sys.displayhook, sys.excepthook, sys.stdout, sys.stderr]),
        'process': [gc.isenabled(), threading.active_count(), os.listdir('.'), os.getcwd()],
        'descriptors': sorted(os.listdir('/proc/self/fd')),
        'environment': sorted(os.environ.items()),
    }
"""


def traces(then: str, home: Path) -> list[dict[str, Any]]:
    answer = in_python(TRACES + then, home)
    return [json.loads(line) for line in answer.splitlines()]


@pytest.mark.full_tier
@pytest.mark.parametrize("how", ["", "failing=True"])
def test_a_warmed_shell_is_as_a_fresh_one(how: str, tmp_path: Path) -> None:
    say = "print(json.dumps(traces()))"
    before, after = traces(f"{say}; warm(shell, {how}); {say}", tmp_path)
    assert after == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full_tier
def test_those_traces_are_what_a_cell_leaves(tmp_path: Path) -> None:
    """The control: else the test above could not fail."""
    cell = "shell.run_cell('x = 1; x', store_history=True); shell.run_cell('1/0')"
    say = "print('\\n' + json.dumps(traces()))"
    answer = in_python(f"{TRACES}{say}; {cell}; {say}", tmp_path).splitlines()
    before, after = (json.loads(line) for line in answer if line.startswith("{"))
    left = {name for name in before if before[name] != after[name]}
    assert left >= {"names", "hidden", "count", "last run", "inputs", "unders", "error", "sources"}


@pytest.mark.full_tier
def test_warming_runs_cells_and_shows_nothing(tmp_path: Path) -> None:
    answer = in_python(
        TRACES + "ran = []\n"
        "shell.events.register('post_run_cell', ran.append)\n"
        "shell.events.register('pre_run_cell', lambda info: ran.append(info.raw_cell))\n"
        "warm(shell)\n"
        "print(len(ran) > 4)",
        tmp_path,
    )
    assert answer == "True\n"


@pytest.mark.full_tier
def test_warming_collects_no_garbage(tmp_path: Path) -> None:
    """In a fork a collection copies every page it looks at."""
    answer = in_python(
        TRACES + "collections = []\n"
        "gc.set_threshold(1)\n"
        "warm(shell)\n"
        "gc.callbacks.append(lambda *more: collections.append(more))\n"
        "gc.disable(); warm(shell, failing=True); print(gc.isenabled(), collections)",
        tmp_path,
    )
    assert answer == "False []\n"


@pytest.mark.full_tier
def test_nothing_is_attached_by_warming_and_cells_count_from_1(tmp_path: Path) -> None:
    answer = in_python(
        TRACES + "warm(shell)\n"
        "shown = []\n"
        "shell.attach(lambda kind, content, hold=False: shown.append((kind, content)))\n"
        "shell.run_cell('6 * 7', store_history=True)\n"
        "print(json.dumps(shown))",
        tmp_path,
    )
    ((kind, content),) = json.loads(answer)
    assert (kind, content["execution_count"]) == ("execute_result", 1)
    assert content["data"] == {"text/plain": "42"}
