"""An alarm that wakes a poll, and nobody before."""

import os
import select

import pytest

from sbx.linux import procfs, timerfd


def test_it_goes_off_once() -> None:
    timer = timerfd.create()
    try:
        timerfd.expires_in(timer, 0.01)
        assert select.select([timer], [], [], 10)[0] == [timer]
        assert timerfd.clear(timer)
        assert not timerfd.clear(timer)
        assert not select.select([timer], [], [], 0.05)[0]
    finally:
        os.close(timer)


def test_setting_it_anew_forgets_what_it_was_set_to() -> None:
    timer = timerfd.create()
    try:
        timerfd.expires_in(timer, 0.001)
        timerfd.expires_in(timer, 60)
        assert not select.select([timer], [], [], 0.05)[0]
    finally:
        os.close(timer)


def test_no_time_at_all_is_at_once_and_not_never() -> None:
    timer = timerfd.create()
    try:
        timerfd.expires_in(timer, 0)
        assert select.select([timer], [], [], 10)[0] == [timer]
    finally:
        os.close(timer)


def test_it_is_closed_on_exec() -> None:
    timer = timerfd.create()
    assert not os.get_inheritable(timer)
    os.close(timer)


def test_an_error_names_the_call() -> None:
    with pytest.raises(OSError, match="timerfd_settime"):
        timerfd.expires_in(-1, 1)


def test_a_process_is_active_when_it_does_something() -> None:
    before = procfs.activity(os.getpid())
    hoard = []
    while (
        procfs.activity(os.getpid()) == before
    ):  # pages that were freed may be had again unnoticed
        hoard.append(bytearray(1 << 20))
    assert len(before) == 4
    assert procfs.activity(2**22 + 1) == ()
