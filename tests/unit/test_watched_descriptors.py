"""Which jails hold too many pipes or epoll instances: judged by /proc, of real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sbx.kernels.memory_watcher import _is_greedy
from sbx.linux import procfs

_HOLD = """
import os, select, sys
pipes, epolls, children = map(int, sys.argv[1:])
held = [os.pipe() for _ in range(pipes)] + [select.epoll() for _ in range(epolls)]
reading, writing = os.pipe()
for _ in range(children):
    if not os.fork():
        os.close(writing)
        os.read(reading, 1)  # until the parent has ended
        os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def processes(*, pipes: int, epolls: int = 0, children: int = 0) -> Iterator[list[int]]:
    words = [sys.executable, "-I", "-c", _HOLD, str(pipes), str(epolls), str(children)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield procfs.descendants(process.pid)


@pytest.mark.parametrize(
    ("pipes", "epolls", "children", "greedy"),
    [(100, 0, 20, False), (300, 200, 3, False), (520, 0, 0, True), (1, 300, 4, True)],
    ids=["an inherited pipe counts once", "some of both", "too many pipes", "too many epolls"],
)
def test_a_jail_is_greedy_by_distinct_pipes_and_by_all_epoll_instances(
    pipes: int, epolls: int, children: int, greedy: bool
) -> None:
    with processes(pipes=pipes, epolls=epolls, children=children) as inside:
        assert len(inside) == 1 + children
        assert _is_greedy(inside) is greedy


@pytest.mark.parametrize("reports", [True, False], ids=["since Linux 6.2", "before"])
def test_zombies_hold_nothing(monkeypatch: pytest.MonkeyPatch, reports: bool) -> None:
    """A jail with three zombies was killed: each was taken for a process that hides its files."""
    if reports and not procfs.reports_descriptors():
        pytest.skip("this Linux reports no number of descriptors")
    monkeypatch.setattr(procfs, "reports_descriptors", lambda: reports)
    zombies = [subprocess.Popen(["/bin/true"]) for _ in range(4)]
    for zombie in zombies:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert [procfs.count_descriptors(zombie.pid) for zombie in zombies] == [0] * 4
    assert not _is_greedy([zombie.pid for zombie in zombies])
    for zombie in zombies:
        zombie.wait()


def test_a_process_that_is_gone_holds_nothing() -> None:
    with processes(pipes=520) as inside:
        pass
    assert not _is_greedy(inside)
    assert procfs.count_descriptors(inside[0]) == 0
    assert procfs.descriptors(inside[0]).pipes == frozenset()
