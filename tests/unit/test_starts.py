"""Counts of how kernels came to be: each count gives a new value, and the old one stays."""

from sbx.telemetry.starts import StartCounts


def test_counts_by_path_and_last_cause() -> None:
    none = StartCounts()
    some = none.with_failed("pool", "it ended").with_failed("fork", "no room").with_served("cold")
    assert some == StartCounts({"cold": 1}, {"pool": 1, "fork": 1}, 0, "no room")
    assert some.with_served("cold").with_started_ahead().served == {"cold": 2}
    assert none == StartCounts({}, {}, 0, "")
