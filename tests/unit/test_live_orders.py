"""Orders to mount in a live jail: one for a target in use, and one whose child cannot start."""

import errno
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sbx.errors import Conflict
from sbx.isolation.broker import live_mounts
from sbx.isolation.broker.live_orders import MountOrders

TARGET = "/mnt/data"


def orders(jail: object) -> MountOrders:
    jails = SimpleNamespace(get=lambda name: jail, own_namespaces=True, by_name={"jail-1": jail})
    return MountOrders(cast("Any", SimpleNamespace()), cast("Any", jails))


def test_a_target_in_use_is_refused_and_stays_mounted() -> None:
    jail = SimpleNamespace(name="jail-1", pid1_fd=0, group="g", attached={TARGET: 7})
    with pytest.raises(Conflict) as raised:
        orders(jail).obey({"do": "attach", "jail": "jail-1", "target": TARGET, "seq": 1})
    assert (raised.value.code, jail.attached) == ("already_mounted", {TARGET: 7})


def test_a_child_that_cannot_start_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(live_mounts, "begin", no_process)
    tree, other = os.pipe()
    os.close(other)
    jail = SimpleNamespace(name="jail-1", pid1_fd=0, group="g", attached={TARGET: tree})
    with pytest.raises(OSError, match="no process"):
        orders(jail).obey({"do": "detach", "jail": "jail-1", "target": TARGET, "seq": 2})
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(tree)
