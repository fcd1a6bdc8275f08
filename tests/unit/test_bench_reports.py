"""The pure parts of the soak test, of the timeline, and of the table of the alternatives."""

from collections import Counter

import pytest

from bench.peers import command
from bench.samples import NotMeasured
from bench.soak import Cell, Memory, Report, Trend, report
from bench.timeline import Step, durations

SECONDS = 1000.0


def soaked(
    *, last_ms: float = 2.0, mib_per_s: float = 0.0, errors: dict[str, int] | None = None
) -> Report:
    cells = [Cell(float(at), last_ms if at >= 900 else 2.0) for at in range(1000)]
    memory = [Memory(float(at), 100 + at * mib_per_s, 50) for at in range(0, 1000, 10)]
    counted = Counter({"cell": 1000})
    return report(SECONDS, cells, {"service": memory}, counted, Counter(errors or {}))


def test_a_service_that_stays_as_it_was_has_no_problems() -> None:
    done = soaked()
    assert done == Report(
        minutes=16.67,
        actions={"cell": 1000},
        errors={},
        cells_per_s=1.0,
        first_ms=(2.0, 2.0),
        last_ms=(2.0, 2.0),
        trends={"service": Trend(100.0, 0.0, 0.0, 50, 50)},
    )
    assert done.problems == []
    assert done.row()["met"] is True


@pytest.mark.parametrize(
    ("done", "problem"),
    [
        (soaked(last_ms=3.2), "a cell takes 1.60 times as long at the end as at the start"),
        (soaked(mib_per_s=0.01), "the memory of the service grows by 36.0 MiB/h"),
        (soaked(errors={"cell: timeout": 3}), "3 times: cell: timeout"),
    ],
)
def test_each_limit_that_is_exceeded_is_a_problem(done: Report, problem: str) -> None:
    assert done.problems == [problem]
    assert done.row()["met"] is False


def test_a_warm_up_that_takes_memory_is_no_growth() -> None:
    cells = [Cell(float(at), 2.0) for at in range(1000)]
    memory = [Memory(float(at), min(at, 300.0), 50) for at in range(0, 1000, 10)]
    assert report(SECONDS, cells, {"broker": memory}, Counter(), Counter()).problems == []


def test_a_run_without_cells_at_its_end_is_not_measured() -> None:
    cells = [Cell(float(at), 2.0) for at in range(500)]
    with pytest.raises(NotMeasured, match="--minutes"):
        report(SECONDS, cells, {}, Counter(), Counter())


def test_a_step_ends_at_the_first_note_of_its_name_after_the_step_before() -> None:
    notes = [("b", 4_000), ("begin", 1_000), ("a", 3_000), ("b", 2_000), ("end", 9_000)]
    steps = (Step("a", "host", "first"), Step("b", "jail", "second"), Step("end", "host", "third"))
    assert durations(notes, steps) == [2.0, 1.0, 5.0]
    with pytest.raises(NotMeasured, match="c is not in"):
        durations(notes, (Step("c", "host", "missing"),))


def test_the_times_of_an_alternative_are_compared_with_those_of_sbx() -> None:
    sbx, other = command.Times.of([1.0, 2.0, 3.0]), command.Times.of([20.0, 10.0, 30.0])
    assert sbx == command.Times(2.0, 1.0, 3.0)
    assert other.text(sbx) == "20 ms (10 to 30), 10 times"
