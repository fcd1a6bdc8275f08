"""What is told of a proxy's decisions, and that asking cannot fill the host's disk."""

from typing import Any

from sbx.egress import EgressDecision
from sbx.service.egress_log import EgressLog


class Noted:
    """In place of an audit log and of events: keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.events: list[tuple[str, str | None, dict[str, Any]]] = []
        self.now = 60.0
        self.log = EgressLog("box", "key:1", self, self.tell, lambda: self.now)  # type: ignore[arg-type]

    def note(self, who: str, what: str, object: str, **details: Any) -> None:
        assert (who, object, details.pop("owner")) == ("sbx", "box", "key:1")
        self.lines.append((what, details))

    def tell(self, kind: str, cause: str | None = None, **details: Any) -> None:
        self.events.append((kind, cause, details))


def decision(allowed: bool, **changes: Any) -> EgressDecision:
    said: dict[str, Any] = {
        "at": 0.0,
        "sandbox": "box",
        "allowed": allowed,
        "rule": "network.allow",
        "host": "example.org",
        "port": 443,
        "method": "CONNECT",
        "path": None,
        "address": None,
        "reason": "" if allowed else "not listed",
    }
    return EgressDecision(**{**said, **changes})


def test_each_decision_is_a_line_and_a_refused_one_an_event() -> None:
    noted = Noted()
    noted.log.add(decision(True))
    noted.log.add(decision(True, ended=True, bytes_in=10, bytes_out=3))
    noted.log.add(decision(False))
    assert [what for what, _ in noted.lines] == [
        "network.allowed", "network.ended", "network.refused",
    ]  # fmt: skip
    about = {"host": "example.org", "port": 443, "method": "CONNECT", "rule": "network.allow"}
    assert noted.lines[1][1] == {**about, "bytes_in": 10, "bytes_out": 3}
    assert noted.events == [
        ("network_refused", "network.allow", {**about, "reason": "not listed"})
    ]  # fmt: skip


def test_the_query_of_a_path_is_left_out() -> None:
    noted = Noted()
    noted.log.add(decision(True, path="/v1/items?key=hunter2"))
    assert noted.lines[0][1]["path"] == "/v1/items"


def test_a_flood_is_counted_and_the_count_told_in_the_next_minute() -> None:
    noted = Noted()
    for _ in range(1000):
        noted.log.add(decision(False, host="x" * 5000))
    assert len(noted.lines) == 600
    assert len(noted.events) == 20
    assert len(noted.lines[0][1]["host"]) == 500
    noted.now += 60
    noted.log.add(decision(False))
    left_out = {"allowed": 0, "refused": 400, "events": 980}
    assert noted.lines[600] == ("network.left_out", left_out)
    assert noted.lines[601][0] == "network.refused"
    assert noted.events[20] == ("network_refused", "too_many", {"left_out": 980})


def test_what_was_left_out_is_told_at_the_end() -> None:
    noted = Noted()
    for _ in range(601):
        noted.log.add(decision(False))
    noted.log.report_dropped()
    noted.log.report_dropped()
    assert [what for what, _ in noted.lines].count("network.left_out") == 1


def test_refused_floods_do_not_hide_what_was_let_through() -> None:
    noted = Noted()
    for _ in range(1000):
        noted.log.add(decision(False))
    noted.log.add(decision(True))
    assert noted.lines[-1][0] == "network.allowed"
