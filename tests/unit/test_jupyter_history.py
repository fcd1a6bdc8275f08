"""What was executed, as clients ask for it; and which comms are open."""

from typing import Any

from sbx.jupyter.handlers import Comms
from sbx.jupyter.history import LINES_MAX, OUTPUT_MAX, TEXT_MAX, CellHistory
from sbx.jupyter.parse import HistoryRequest as Asked
from sbx.jupyter.serialize import JupyterMessage


def two_sessions() -> CellHistory:
    history = CellHistory()
    history.begin_session()
    history.add(1, "a = 1")
    history.add(2, "a", "1")
    history.begin_session()
    history.add(1, "b = 2")
    history.add(2, "a", "NameError")
    history.add(3, "b", "2")
    return history


def asked(history: CellHistory, **how: Any) -> list[Any]:
    reply = history.reply(Asked(**how))
    assert reply["status"] == "ok"
    found: list[Any] = reply["history"]
    return found


def test_tail_gives_the_last_lines_of_all_sessions() -> None:
    history = two_sessions()
    assert asked(history, hist_access_type="tail", n=2) == [(2, 2, "a"), (2, 3, "b")]
    assert len(asked(history, hist_access_type="tail")) == 5
    assert asked(history, hist_access_type="tail", n=-1) == []


def test_range_gives_lines_of_one_session() -> None:
    history = two_sessions()
    assert asked(history, hist_access_type="range", session=1) == [(1, 1, "a = 1"), (1, 2, "a")]
    assert asked(history, hist_access_type="range", session=-1, start=2) == [(1, 2, "a")]
    found = asked(history, hist_access_type="range", start=1, stop=3)
    assert found == [(2, 1, "b = 2"), (2, 2, "a")]
    assert asked(history, hist_access_type="range", session=-9) == []


def test_search_gives_lines_that_fit_a_glob() -> None:
    history = two_sessions()
    found = asked(history, hist_access_type="search", pattern="*= ?", n=10)
    assert found == [(1, 1, "a = 1"), (2, 1, "b = 2")]
    assert asked(history, hist_access_type="search", pattern="a", n=1) == [(2, 2, "a")]
    found = asked(history, hist_access_type="search", pattern="?", unique=True)
    assert found == [(2, 2, "a"), (2, 3, "b")]
    assert asked(history, hist_access_type="search", pattern="[") == []


def test_outputs_come_when_they_are_asked_for() -> None:
    found = asked(two_sessions(), hist_access_type="range", session=1, output=True)
    assert found == [(1, 1, ("a = 1", None)), (1, 2, ("a", "1"))]


def test_the_oldest_lines_make_room() -> None:
    history = CellHistory()
    for number in range(LINES_MAX + 5):
        history.add(number, "x")
    assert asked(history, hist_access_type="tail", n=LINES_MAX * 2)[0] == (0, 5, "x")
    history.add(1, "y" * (TEXT_MAX - 1))
    assert [line[1] for line in asked(history, n=LINES_MAX)] == [LINES_MAX + 4, 1]
    history.add(2, "z" * (TEXT_MAX + 1))
    assert asked(history) == []


def test_a_long_output_is_cut() -> None:
    history = CellHistory()
    history.add(1, "x", "o" * OUTPUT_MAX * 2)
    assert asked(history, output=True) == [(0, 1, ("x", "o" * OUTPUT_MAX))]


def opened(name: str, target: str) -> JupyterMessage:
    return JupyterMessage("comm_open", {"comm_id": name, "target_name": target, "data": {}})


def test_open_comms_are_listed_until_they_are_closed() -> None:
    comms = Comms()
    for name, target in (("1", "w"), ("2", "w"), ("3", "v")):
        comms.note(opened(name, target))
    comms.note(JupyterMessage("comm_msg", {"comm_id": "9", "data": {}}))
    comms.note(JupyterMessage("comm_close", {"comm_id": "2", "data": {}}))
    comms.note(JupyterMessage("comm_close", {"comm_id": "7", "data": {}}))
    assert comms.listed("w") == {"status": "ok", "comms": {"1": {"target_name": "w"}}}
    assert list(comms.listed(None)["comms"]) == ["1", "3"]


def test_the_list_of_comms_is_bounded() -> None:
    comms = Comms()
    comms.note(opened("x" * 300, "t"))
    comms.note(opened("x", "t" * 300))
    for number in range(30_000):
        comms.note(opened(str(number), "t"))
    assert len(comms.listed(None)["comms"]) == 20_000
