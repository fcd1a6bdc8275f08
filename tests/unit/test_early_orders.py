"""The orders that a process sends to its broker before the runtime is imported: see the module."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbx.isolation.broker import early_orders
from sbx.isolation.broker.early_orders import EarlyOrders

HELLO = {"bwrap": None, "uids": (7, 9), "groups": True, "confined": False, "runtime": 1, "id": "a"}
KEPT_HELLO = {"bwrap": None, "uids": [7, 9], "groups": True, "confined": False}
ZYGOTE = {"zygote": "ab", "args": ("--x",), "prepare": {"walls": {"read": ("/usr",)}}}
KEPT_ZYGOTE = {"zygote": "ab", "args": ["--x"], "prepare": {"walls": {"read": ["/usr"]}}}
NOTHING = EarlyOrders("p")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "sbx" / "early_orders.json"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    its.setblocking(False)
    with ours, its:
        yield ours, its


def received(sock: socket.socket) -> list[dict[str, Any]]:
    packets = []
    while True:
        try:
            packets.append(json.loads(sock.recv(1 << 18)))
        except BlockingIOError:
            return packets


def test_the_orders_of_one_process_are_sent_by_the_next(
    file: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    early = early_orders.send(ends[0], "p")
    assert early == EarlyOrders("p", KEPT_HELLO, KEPT_ZYGOTE)
    hello, zygote = received(ends[1])
    assert hello.pop("runtime") == os.getpid()
    assert hello.pop("id") != "a"
    assert hello == {"seq": 1, "do": "hello", **KEPT_HELLO}
    assert zygote == {"seq": 2, "do": "start_zygote", **KEPT_ZYGOTE}


def test_a_policy_without_a_zygote_gets_only_hello(
    file: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    assert early_orders.send(ends[0], "q") == EarlyOrders("q", KEPT_HELLO, None)
    assert [order["do"] for order in received(ends[1])] == ["hello"]


def test_orders_are_equal_by_value_and_not_by_process() -> None:
    early = EarlyOrders("p", KEPT_HELLO, KEPT_ZYGOTE)
    assert early.matches_hello({**HELLO, "runtime": 2, "id": "b"})
    assert not early.matches_hello({**HELLO, "uids": (7, 10)})
    assert early.matches_zygote(ZYGOTE)
    assert not early.matches_zygote({**ZYGOTE, "args": ("--y",)})
    assert NOTHING.matches_hello(HELLO)
    assert not NOTHING.matches_zygote(ZYGOTE)


def test_a_zygote_that_no_kernel_needed_is_forgotten(file: Path) -> None:
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    EarlyOrders("q").keep(HELLO, ZYGOTE)
    EarlyOrders("p", KEPT_HELLO, KEPT_ZYGOTE).keep(HELLO, None)
    assert json.loads(file.read_text()) == {"hello": KEPT_HELLO, "zygotes": {"q": KEPT_ZYGOTE}}


def test_equal_orders_are_not_written_again(file: Path) -> None:
    EarlyOrders("p", KEPT_HELLO, KEPT_ZYGOTE).keep(HELLO, ZYGOTE)
    assert not file.exists()


def test_the_latest_eight_policies_are_kept(file: Path) -> None:
    for number in range(10):
        EarlyOrders(f"p{number}").keep(HELLO, ZYGOTE)
    EarlyOrders("p2").keep(HELLO, {**ZYGOTE, "args": []})
    kept = json.loads(file.read_text())["zygotes"]
    assert list(kept) == ["p3", "p4", "p5", "p6", "p7", "p8", "p9", "p2"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        '{"hello": 5, "zygotes": {}}',
        '{"hello": {}, "zygotes": []}',
        '{"hello": {"groups": true}, "zygotes": {"p": {}}}',
        '{"hello": {"groups": true}, "zygotes": {"p": {"zygote": 5}}}',
        "[" * 100_000,
    ],
)
def test_a_file_of_another_form_is_not_used(
    file: Path, ends: tuple[socket.socket, socket.socket], text: str
) -> None:
    file.parent.mkdir()
    file.write_text(text)
    file.chmod(0o600)
    assert early_orders.send(ends[0], "p") == NOTHING
    assert received(ends[1]) == []
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    assert json.loads(file.read_text())["hello"] == KEPT_HELLO


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_open_is_not_read(
    file: Path, ends: tuple[socket.socket, socket.socket], mode: int
) -> None:
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    file.chmod(mode)
    assert early_orders.send(ends[0], "p") == NOTHING


@pytest.mark.needs("root")
def test_a_file_of_another_user_is_not_read(
    file: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    os.chown(file, 65534, -1)
    assert early_orders.send(ends[0], "p") == NOTHING


def test_a_link_or_a_fifo_is_not_read(
    file: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    other = file.rename(file.with_name("other"))
    file.symlink_to(other)
    assert early_orders.send(ends[0], "p") == NOTHING
    file.unlink()
    os.mkfifo(file, 0o600)
    assert early_orders.send(ends[0], "p") == NOTHING


def test_without_a_home_or_a_writable_directory_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, socket.socket]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/none")
    EarlyOrders("p").keep(HELLO, ZYGOTE)
    assert early_orders.send(ends[0], "p") == NOTHING


def test_a_broker_that_reads_nothing_gets_what_fits(
    file: Path, ends: tuple[socket.socket, socket.socket]
) -> None:
    EarlyOrders("p").keep(HELLO, {**ZYGOTE, "args": ["x" * 600_000]})
    assert early_orders.send(ends[0], "p") == EarlyOrders("p", KEPT_HELLO, None)
    assert [order["do"] for order in received(ends[1])] == ["hello"]
