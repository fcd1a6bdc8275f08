"""Which newcomer gets a place among the open connections, and which one is closed for it."""

import os

import pytest
from uvicorn.server import ServerState

from sbx.api.admission import (
    Admission,
    AdmissionDecision,
    AdmissionPlace,
    TcpOpen,
    UnixOpen,
    admission_of,
    decide,
)
from sbx.errors import Unavailable

ADMIT, REFUSE = AdmissionDecision.ADMIT, AdmissionDecision.REFUSE
REPLACE, OF_ADDRESS = AdmissionDecision.REPLACE, AdmissionDecision.REPLACE_OF_ADDRESS
REPLACE_IDLE = AdmissionDecision.REPLACE_IDLE
OPERATOR, OTHER, THIRD = os.geteuid(), 4242, 4243


@pytest.mark.parametrize(
    ("counts", "most", "decision"),
    [
        (TcpOpen(), 1000, ADMIT),
        (TcpOpen(999, 499, 249), 1000, ADMIT),
        (TcpOpen(500, 500, 0), 1000, REPLACE),
        (TcpOpen(300, 250, 250), 1000, OF_ADDRESS),
        (TcpOpen(1000, 1, 0), 1000, REPLACE),
        (TcpOpen(1000, 0, 0), 1000, REFUSE),
        (TcpOpen(1000, 1, 0, 999), 1000, REPLACE),
        (TcpOpen(1000, 0, 0, 1), 1000, REPLACE_IDLE),
        (TcpOpen(999, 0, 0, 999), 1000, ADMIT),
        (TcpOpen(0, 0, 0), 1, ADMIT),
        (TcpOpen(1, 1, 0), 1, REPLACE),
        (TcpOpen(1, 0, 0), 1, REFUSE),
        (UnixOpen(operator=True), 1000, ADMIT),
        (UnixOpen(operator=True, connections=999, others=984, of_user=15), 1000, ADMIT),
        (UnixOpen(operator=True, connections=1000), 1000, REFUSE),
        (UnixOpen(operator=False, connections=984, others=984), 1000, REFUSE),
        (UnixOpen(operator=False, connections=983, others=983, of_user=499), 1000, ADMIT),
        (UnixOpen(operator=False, connections=500, others=500, of_user=500), 1000, REFUSE),
        (UnixOpen(operator=True), 1, ADMIT),
        (UnixOpen(operator=False), 1, ADMIT),
        (UnixOpen(operator=False, connections=1, others=1), 2, REFUSE),
    ],
    ids=str,
)
def test_a_newcomer_is_judged_by_the_open_connections(
    counts: TcpOpen | UnixOpen, most: int, decision: AdmissionDecision
) -> None:
    assert decide(counts, most) is decision


class Connections:
    """Those of one Admission; `closed` are the names of the closed ones."""

    def __init__(self, most: int) -> None:
        self.admission = Admission(most)
        self.closed: list[str] = []

    def tcp(self, name: str, host: str = "127.0.0.1") -> AdmissionPlace:
        place = self.admission.enter_tcp(host, lambda: self.closed.append(name))
        assert place is not None
        return place

    def unix(self, user: int) -> AdmissionPlace:
        place = self.admission.enter_unix(user, lambda: None)
        assert place is not None
        return place


def test_the_oldest_unauthenticated_connection_gives_way() -> None:
    those = Connections(8)
    places = [those.tcp(name) for name in "abcd"]
    those.tcp("e")
    assert those.closed == ["a"]
    places[1].begin_request()
    places[1].end_request()  # without a key: it is as old as before
    those.tcp("f")
    assert those.closed == ["a", "b"]
    assert not any(place.refused for place in places)


def test_a_slow_request_does_not_cost_newcomers_their_places() -> None:
    """Newcomers once took turns in the last place, while slow logins held the others."""
    those = Connections(8)
    for name in "abcd":
        those.tcp(name).begin_request()
    for name in "efg":
        those.tcp(name)
    assert those.closed == ["a", "b", "c"]


def test_an_authenticated_connection_is_not_closed_for_others() -> None:
    those = Connections(4)
    for name in "abcd":
        those.tcp(name).authenticated(name)
    assert those.tcp("e").refused
    assert those.closed == []


def test_an_authenticated_connection_may_ask_and_rest_and_leave() -> None:
    those = Connections(2)
    place = those.tcp("a")
    place.begin_request()
    place.authenticated("ann")
    place.end_request()
    place.begin_request()
    those.tcp("b")
    those.tcp("c")
    assert those.closed == ["b"]
    place.leave()
    place.leave()
    assert not those.tcp("d").refused


def test_a_request_without_a_key_makes_a_connection_unauthenticated_again() -> None:
    """A client whose token was revoked once kept its place."""
    those = Connections(4)
    place = those.tcp("a")
    place.begin_request()
    place.authenticated("ann")
    place.end_request()
    place.begin_request()
    place.end_request()
    those.tcp("b")
    those.tcp("c")
    assert those.closed == ["a"]


def test_the_connection_that_is_idle_for_longest_gives_way_where_all_have_a_key() -> None:
    """One client with a key could once lock out all others by idle connections."""
    those = Connections(4)
    places = []
    for name in "abcd":
        places.append(those.tcp(name))
        places[-1].begin_request()
        places[-1].authenticated(name)
    places[2].end_request()
    places[1].end_request(flushed=False)  # its client has not read the reply
    places[0].end_request()
    those.tcp("e").authenticated("e")
    those.tcp("f").authenticated("f")
    assert those.closed == ["c", "a"]
    assert those.tcp("g").refused


def test_connections_of_the_unix_socket_are_not_closed_for_others() -> None:
    those = Connections(2)
    place = those.unix(OPERATOR)
    place.begin_request()
    place.authenticated("ann")
    place.end_request()
    for name in "ab":
        those.tcp(name).authenticated(name)
    assert those.tcp("c").refused


def test_unauthenticated_connections_of_one_address_take_a_quarter() -> None:
    those = Connections(8)
    those.tcp("other", "192.0.2.1")
    for name in "abc":
        those.tcp(name, "192.0.2.9")
    assert those.closed == ["a"]


def test_an_ipv6_network_is_one_address() -> None:
    those = Connections(8)
    for number in range(3):
        those.tcp(f"{number}", f"2001:db8::{number}")
    assert those.closed == ["0"]


def test_an_ipv4_address_that_is_mapped_is_itself() -> None:
    those = Connections(8)
    for number in range(3):
        those.tcp(f"{number}", f"::ffff:192.0.2.{number}")
    assert those.closed == []
    for name in "ab":
        those.tcp(name, "192.0.2.1")
    assert those.closed == ["1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_not_counted_by_address(host: str) -> None:
    those = Connections(8)
    for name in "abcd":
        those.tcp(name, host)
    assert those.closed == []


def test_tcp_takes_no_place_of_the_unix_socket() -> None:
    those = Connections(2)
    for name in "abc":
        those.tcp(name).authenticated(name)
    assert not those.unix(OPERATOR).refused


def test_no_user_takes_the_places_of_the_operator() -> None:
    those = Connections(8)
    others = [those.unix(user) for user in [OTHER] * 5 + [THIRD]]
    assert [place.refused for place in others] == [False] * 4 + [True, True]
    assert not any(those.unix(OPERATOR).refused for _ in range(4))
    others[0].leave()
    others[4].leave()
    assert not those.unix(THIRD).refused


def test_few_are_told_that_they_are_refused() -> None:
    admission = Admission(4)
    for _ in range(4):
        admission.enter_unix(OPERATOR, lambda: None)
    answer = admission.enter_unix(OPERATOR, lambda: None)
    assert answer is not None
    assert answer.refused
    assert admission.enter_unix(OPERATOR, lambda: None) is None
    answer.leave()
    assert admission.enter_unix(OPERATOR, lambda: None) is not None


def test_connections_of_a_server_share_their_places() -> None:
    server = ServerState()
    assert admission_of(server, 1) is admission_of(server, 1)
    assert admission_of(ServerState(), 1) is not admission_of(server, 1)


def test_an_owner_has_a_quarter_of_the_places_over_tcp() -> None:
    """One key once took all connections by port tunnels: each request of a second owner was a 503
    (holes 2.10)."""
    those = Connections(8)
    places = [those.tcp(name) for name in "abc"]
    for place in places:
        place.begin_request()
    places[0].authenticated("ann")
    places[1].authenticated("ann")
    with pytest.raises(Unavailable) as raised:
        places[2].authenticated("ann")
    assert raised.value.code == "too_many_connections"
    assert raised.value.details["retry_after_s"]
    places[2].authenticated("bob")  # of a reverse proxy, which sends requests of both
    places[0].end_request()
    those.tcp("d").authenticated("ann")
    assert those.closed == ["a"]
    places[1].leave()
    those.tcp("e").authenticated("ann")
    those.unix(OPERATOR).authenticated("ann")
    assert those.closed == ["a"]
