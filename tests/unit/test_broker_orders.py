"""Orders that the broker cannot obey fail alone: the broker and all other jails live on.

A broker without bubblewrap, over a socket of the test, which gives it one turn for each order.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sbx.errors import Broken, Unavailable
from sbx.isolation import cgroups
from sbx.isolation.broker import bind_staging
from sbx.isolation.broker.jails import BrokerJail
from sbx.isolation.broker.sandboxes import BrokerSandbox, Group
from sbx.isolation.broker.server import PACKET_MAX, BrokerServer
from sbx.isolation.broker.spawn import Started
from sbx.isolation.broker.zygotes import ZygoteProcess
from sbx.linux import procfs

NO_LIMITS = cgroups.CgroupLimits()


class Groups:
    """The cgroup of a sandbox, or of a jail, on a host that refuses what `refused` names."""

    path = None

    def __init__(self, *refused: str, oom_kills: int = 0) -> None:
        self.refused = refused
        self.oom_kills = oom_kills
        self.done: list[str] = []

    def _do(self, name: str) -> None:
        self.done.append(name)
        if name in self.refused:
            raise TimeoutError if name == "remove" else OSError(5, f"{name} is refused")

    def make_sandbox(self, name: str, limits: object) -> "Groups":
        return self

    def make_jail(self, name: str) -> "Groups":
        self._do("make_jail")
        return self

    def limits(self) -> cgroups.CgroupLimits:
        return NO_LIMITS

    def watch_memory(self) -> int | None:
        self._do("watch_memory")
        return None

    def throttle(self, on: bool) -> None:
        self._do("throttle")

    def usage(self) -> cgroups.CgroupUsage:
        self._do("usage")
        return cgroups.CgroupUsage()

    def events(self) -> cgroups.CgroupEvents:
        self._do("events")
        return cgroups.CgroupEvents(oom_kills=self.oom_kills)

    def kill(self) -> None:
        self._do("kill")
        self.refused = ()

    def remove(self, within_s: float) -> None:
        self._do("remove")


class Driven:
    """A broker, and the runtime's end of its socket."""

    def __init__(self) -> None:
        self.ours, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.broker = BrokerServer(self._its)
        self.broker._sandboxes.as_root = False
        self.broker._sandboxes.hierarchy = cast("cgroups.Hierarchy", Groups())
        self.ours.settimeout(60)

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        self.ours.send(json.dumps({"seq": 7, "do": do, **words}).encode())
        self.broker._receive()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        reported: dict[str, Any] = json.loads(self.ours.recv(PACKET_MAX))
        return reported

    def refused(self, do: str, **words: Any) -> tuple[str, str]:
        reported = self.ask(do, **words)
        assert reported["seq"] == 7
        return reported["error"]["code"], reported["error"]["message"]

    def jail(self, name: str = "j", **words: Any) -> BrokerJail:
        made = self.broker._jails.by_name[name] = BrokerJail(name, 3, **words)
        return made

    def sandbox(self, groups: Groups | None = None, **words: Any) -> BrokerSandbox:
        group = cast("cgroups.SandboxGroup", groups or Groups())
        made = self.broker._sandboxes.by_name["s"] = BrokerSandbox(group, None, **words)
        return made

    def close(self) -> None:
        self.ours.close()
        self._its.close()
        self.broker._loop.close()


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven()
    yield driven
    driven.close()


def grouped(groups: Groups) -> Group:
    return Group(cast("cgroups.JailGroup", groups), NO_LIMITS)


# -- packets ---------------------------------------------------------------------------------------


def test_packet_that_is_no_order_is_dropped_with_its_descriptors(
    driven: Driven, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(driven.ours, [b"{cut off"], [0, 1])
    driven.broker._receive()
    assert len(os.listdir("/proc/self/fd")) == before
    assert "an order cannot be read" in capfd.readouterr().err
    assert driven.ask("ping") == {"seq": 7, "ok": {}}


def test_it_ends_with_its_socket(driven: Driven) -> None:
    driven.ours.close()
    driven.broker._receive()
    assert not driven.broker._loop.serving
    driven.broker._loop.serving = True
    driven._its.close()
    driven.broker._receive()
    assert not driven.broker._loop.serving
    driven.broker._loop.serving = True
    driven.broker._loop.send({})
    assert not driven.broker._loop.serving


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"do": "dance"}, "no order 'dance'"),
        ({"do": "hello"}, "greeted already"),
        ({"do": "usage"}, "could not usage"),  # a word is missing
        ({"do": "usage", "sandbox": "none"}, "sandbox none does not exist"),
        ({"do": "inspect", "jail": "none", "fresh": True}, "jail none does not exist"),
        ({"do": "counters", "jail": "none"}, "jail none does not exist"),
        ({"do": "unlinked", "jail": "none", "device": 1}, "jail none does not exist"),
        ({"do": "attach", "jail": "none", "target": "/x"}, "jail none does not exist"),
        ({"do": "fork", "jail": "j", "zygote": "none", "ahead": False}, "the zygote has ended"),
        ({"do": "confine"}, "has the grants of the runtime already"),  # it is not confined
    ],
    ids=lambda given: given.get("do") if isinstance(given, dict) else "",
)
def test_order_that_cannot_be_obeyed_is_answered(
    driven: Driven, order: dict[str, Any], message: str
) -> None:
    assert message in driven.refused(**order)[1]
    assert driven.ask("ping") == {"seq": 7, "ok": {}}


def test_what_is_gone_already_is_killed_and_dropped_without_an_error(driven: Driven) -> None:
    assert driven.ask("kill", jail="none")["ok"] == {}
    assert driven.ask("drop_sandbox", sandbox="none")["ok"] == {}
    assert driven.ask("retire_zygote", zygote="none")["ok"] == {}


# -- a confined runtime ----------------------------------------------------------------------------


def test_confined_runtime_orders_nothing_before_its_bounds_are_known(driven: Driven) -> None:
    driven.broker._sandboxes.confined = True
    assert driven.refused("ping")[0] == "not_granted"


def test_confined_runtime_gets_no_other_bwrap_and_no_name_twice(driven: Driven) -> None:
    driven.broker._sandboxes.confined, driven.broker._bwrap = True, "/usr/bin/bwrap"
    driven.broker._confinement = cast("Any", object())
    for do in ("launch", "start_zygote"):
        assert "not the bwrap" in driven.refused(do, bwrap="/workspace/bwrap")[1]
    driven.jail("j")
    with pytest.raises(Broken, match="already"):
        driven.broker._check_new("j")
    driven.broker._check_new("k")


# -- sandboxes -------------------------------------------------------------------------------------


def test_sandbox_is_made_though_its_group_cannot_be_made_ahead(
    driven: Driven, capfd: pytest.CaptureFixture[str]
) -> None:
    groups = Groups("make_jail", "watch_memory")
    driven.broker._sandboxes.hierarchy = cast("cgroups.Hierarchy", groups)
    reported = driven.ask("make_sandbox", sandbox="s", limits=NO_LIMITS._asdict(), uid=None)
    assert reported["ok"] == {"uid": os.geteuid(), "gid": os.getegid()}
    said = capfd.readouterr().err
    assert "no group could be made ahead" in said
    assert "will not end as a whole" in said


def test_owner_is_mapped_by_root_alone(driven: Driven) -> None:
    driven.sandbox()
    assert "by a broker that is root" in driven.refused("map_owner", sandbox="s")[1]


def test_sandbox_whose_group_does_not_go_is_an_error_unless_a_jail_holds_it(
    driven: Driven,
) -> None:
    made = driven.sandbox(Groups("remove"))
    assert "could not drop_sandbox" in driven.refused("drop_sandbox", sandbox="s")[1]
    driven.broker._sandboxes.by_name["s"] = made
    driven.jail(sandbox=made)
    assert driven.ask("drop_sandbox", sandbox="s")["ok"] == {}
    assert made.dropped
    assert not made.removed


def test_usage_that_cannot_be_read_is_unknown(driven: Driven) -> None:
    driven.broker._sandboxes.hierarchy = cast("cgroups.Hierarchy", type("H", (), {"version": 1}))
    driven.sandbox(Groups("usage"))
    reported = driven.ask("usage", sandbox="s")["ok"]
    assert (reported["memory"], reported["jails"], reported["network"]) == (None, 0, [0, 0, 0])


def test_each_jail_with_a_process_that_was_killed_for_memory_ends(driven: Driven) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    try:
        short = driven.sandbox(memory=reading)
        hit = driven.jail("hit", sandbox=short, group=grouped(Groups(oom_kills=1)))
        driven.jail("well", sandbox=short, group=grouped(Groups()))
        driven.jail("unknown", sandbox=short, group=grouped(Groups("events")))
        assert driven.broker._jails.end_short() is None
        driven.broker._sandboxes.note_shortage(short)
        assert driven.broker._jails.end_short() is not None
        assert set(driven.broker._jails.dying) == {hit.name}
        short.short_until = 0.0
        assert driven.broker._jails.end_short() is None
    finally:
        os.close(reading)
        os.close(writing)


def test_quota_is_lifted_for_a_jail_that_dies_slowly(
    driven: Driven, capfd: pytest.CaptureFixture[str]
) -> None:
    groups = Groups("throttle")
    made = driven.sandbox(groups)
    driven.jail(sandbox=made)
    driven.broker._jails.dying["j"] = time.monotonic() - 1
    assert driven.broker._jails.unthrottle_dying() is None
    assert made.dying == {"j"}
    assert groups.done == ["throttle"]
    assert "the CPU quota" in capfd.readouterr().err


# -- jails -----------------------------------------------------------------------------------------


def test_jail_that_is_in_no_sandbox_shows_attaches_and_covers_nothing(driven: Driven) -> None:
    driven.sandbox()
    driven.jail()
    for do, words in (
        ("inspect", {"fresh": False}),
        ("attach", {"target": "/workspace/x"}),
        ("mask", {"places": []}),
    ):
        assert "in no sandbox" in driven.refused(do, jail="j", **words)[1]
    assert "is not idle" in driven.refused("enter", jail="j", sandbox="s")[1]


def test_nothing_is_attached_without_namespaces_or_at_other_targets(driven: Driven) -> None:
    driven.jail(pid1_fd=-1, group=grouped(Groups()), attached={"/mnt/sbx/there": -1})
    attach = {"jail": "j", "source": "/tmp", "read_only": True, "expected": None}
    for do, words in (("attach", attach), ("mask", {"jail": "j", "places": []})):
        assert driven.refused(do, target="/mnt/sbx/x", **words)[0] == "live_mount_unavailable"
    driven.broker._jails.own_namespaces = True
    assert "nothing is mounted at /etc" in driven.refused("attach", target="/etc", **attach)[1]


def test_jail_whose_descriptors_are_lost_was_not_forked(driven: Driven) -> None:
    """Linux drops descriptors for which the broker has no room."""
    driven.jail(zygote="z", group=grouped(Groups("events")))
    driven.broker._zygotes.adopt(driven.broker._jails.by_name["j"], [])
    assert "no descriptor left" in driven.answer()["error"]["message"]
    assert not driven.broker._jails.by_name
    driven.broker._zygotes.adopt(None, [])


def test_jail_whose_processes_cannot_be_known_was_not_forked(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(pidfd: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(procfs, "pid_of", unreadable)
    driven.jail(zygote="z")
    null = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    driven.broker._zygotes.adopt(driven.broker._jails.by_name["j"], null)
    reported = driven.answer()["error"]
    assert reported["code"] == "launch_failed"
    assert "its processes cannot be known" in reported["message"]


def test_jail_that_was_given_up_is_not_adopted(driven: Driven) -> None:
    pidfds = [os.pidfd_open(os.getpid()) for _ in range(2)]
    driven.broker._zygotes.adopt(None, pidfds)
    for fd in pidfds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_refusal_of_a_forked_jail_ends_its_setup(driven: Driven) -> None:
    for packet, why in ((b'{"refused": "no room"}', "no room"), (b"", "")):
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            jail = driven.jail(setup=ours)
            driven.broker._loop.watch(ours.fileno(), lambda: None)
            if packet:
                its.send(packet)
            else:
                its.close()
            driven.broker._zygotes.read_setup(jail)
        assert (jail.last_words, jail.setup) == (why, None)


def test_group_of_a_jail_that_does_not_go_is_killed_first(driven: Driven) -> None:
    groups = Groups("remove")
    made = driven.sandbox()
    driven.broker._jails.clear_away(driven.jail(sandbox=made, group=grouped(groups)))
    assert groups.done == ["remove", "kill", "remove"]


def test_group_of_a_jail_that_stays_is_left_to_the_next_runtime(
    driven: Driven, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(name: str) -> None:
        raise OSError(16, "busy")

    monkeypatch.setattr(bind_staging, "clear", stuck)
    monkeypatch.setattr(Groups, "kill", lambda groups: groups._do("kill"))
    made = driven.sandbox()
    started = Started(0, -1, -1, -1)
    jail = driven.jail(sandbox=made, group=grouped(Groups("remove", "kill")), started=started)
    driven.broker._jails.clear_away(jail)
    said = capfd.readouterr().err
    assert "the cgroup of jail j is left" in said
    assert "a bind of jail j is left" in said


# -- zygotes ---------------------------------------------------------------------------------------


@pytest.fixture
def zygote(driven: Driven) -> Iterator[tuple[ZygoteProcess, socket.socket]]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    made = ZygoteProcess("z", 5, None, ours, Started(0, -1, -1, -1))
    driven.broker._zygotes.by_name["z"] = made
    driven.broker._loop.watch(ours.fileno(), lambda: None)
    yield made, its
    its.close()
    ours.close()


def test_jail_that_a_zygote_could_not_fork_fails_with_its_reason(
    driven: Driven, zygote: tuple[ZygoteProcess, socket.socket]
) -> None:
    made, its = zygote
    made.ready = True
    made._forking[b"1"] = "j"
    driven.jail(zygote="z")
    its.send(b"1 no memory")
    driven.broker._zygotes.read(made)
    reported = driven.answer()
    assert reported["seq"] == 3
    assert "no jail could be forked: no memory" in reported["error"]["message"]


def test_end_of_a_zygote_ends_only_jails_that_it_had_not_told_of(
    driven: Driven, zygote: tuple[ZygoteProcess, socket.socket]
) -> None:
    made, its = zygote
    made.ready = True
    driven.jail("forking", zygote="z")
    driven.jail("lives", zygote="z", pid1_fd=0)
    its.close()
    driven.broker._zygotes.read(made)
    assert "its zygote ended" in driven.answer()["error"]["message"]
    assert driven.answer() == {"event": "zygote_gone", "zygote": "z", "why": "it ended"}
    assert set(driven.broker._jails.by_name) == {"lives"}
    driven.broker._zygotes.end(made, "again")  # does nothing
    assert driven.refused("fork", jail="k", zygote="z", ahead=True)[0] == "zygote_gone"


def test_zygote_that_refuses_keeps_its_reason(
    driven: Driven, zygote: tuple[ZygoteProcess, socket.socket]
) -> None:
    made, its = zygote
    its.send(b'{"refused": "a module started threads"}')
    driven.broker._zygotes.read(made)
    assert made.refused == "a module started threads"


def test_zygote_that_takes_no_order_is_gone(
    driven: Driven, zygote: tuple[ZygoteProcess, socket.socket]
) -> None:
    made, its = zygote
    its.close()
    with pytest.raises(Unavailable) as raised:
        made.fork("j", 0, 1, ahead=False)
    assert raised.value.code == "zygote_gone"
    made.orders.close()
    assert made.read() == (b"", [])
