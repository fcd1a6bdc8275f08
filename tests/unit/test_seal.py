"""Each step of the lockdown checks what it did, and names the wall that it could not put up.

The steps run in a child of the test, since no process can undo them.
"""

import importlib
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sbx.guest.start import lockdown
from sbx.linux import capabilities, landlock, prctl
from tests.unit.in_child import in_child

needs_landlock = pytest.mark.skipif(not landlock.supported(), reason="this Linux has no Landlock")
INVALID = bytes(8).hex()  # one instruction, which does not return
WALLS = {
    "landlock": True,
    "read": ["/"],
    "write": [],
    "devices": [],
    "guarded": [],
    "connect": [],
    "files_only": ["/tmp"],
}


@pytest.mark.needs("root")
def test_capabilities_that_are_left_are_noticed() -> None:
    def act(report: int) -> None:
        prctl.set_no_new_privs()
        lockdown.check_unprivileged()

    assert in_child(act) == "capabilities: EPERM"


@pytest.mark.needs("root")
def test_a_process_that_may_gain_privileges_is_noticed() -> None:
    def act(report: int) -> None:
        capabilities.drop_all()
        lockdown.check_unprivileged()

    assert in_child(act) == "no_new_privs: EPERM"


@pytest.mark.needs("root")
def test_a_process_without_privileges_passes() -> None:
    def act(report: int) -> None:
        capabilities.drop_all()
        prctl.set_no_new_privs()
        lockdown.check_unprivileged()

    assert in_child(act) == "None"


def test_every_other_descriptor_is_closed() -> None:
    """Also those right above and below a descriptor that stays."""

    def act(report: int) -> bool:
        opened = [os.dup(report) for _ in range(9)]
        kept = {report, opened[1], opened[5]}
        lockdown.close_all_but(sorted(kept))
        return {fd for fd in range(3, max(opened) + 100) if is_open(fd)} == kept

    assert in_child(act) == "True"


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_limits_are_soft_and_hard_and_never_raised() -> None:
    def act(report: int) -> list[tuple[int, int]]:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 100))
        lockdown.limit({"NOFILE": 64, "CORE": 1 << 30, "FSIZE": 4096})
        names = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)
        return [resource.getrlimit(name) for name in names]

    assert in_child(act) == str([(64, 64), (100, 100), (4096, 4096)])


def test_a_limit_that_linux_refuses_is_named() -> None:
    assert in_child(lambda report: lockdown.limit({"NOFILE": -2})) == "rlimit NOFILE: EINVAL"


@needs_landlock
@pytest.mark.needs("root")
def test_a_domain_that_linux_refuses_is_named() -> None:
    def entering(enter: Callable[[Mapping[str, Any]], object]) -> str:
        def act(report: int) -> object:
            capabilities.drop_all()  # and not no_new_privs
            return enter(WALLS)

        return in_child(act)

    assert entering(lockdown.enter_domain) == "landlock: EPERM"
    assert entering(lockdown.enter_files_only_domain) == "landlock: EPERM"


def test_without_landlock_no_domain_is_entered() -> None:
    walls = {**WALLS, "landlock": False, "files_only": []}
    assert in_child(lambda report: lockdown.enter_domain(walls)) == "0"
    assert in_child(lambda report: lockdown.enter_files_only_domain(walls)) == "None"


def test_a_ruleset_that_cannot_be_completed_is_closed() -> None:
    def act(report: int) -> bool:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TypeError):
            lockdown.ruleset({**WALLS, "guarded": None})
        return len(os.listdir("/proc/self/fd")) == before

    assert in_child(act) == "True"


def test_a_filter_that_linux_refuses_is_named() -> None:
    def act(report: int) -> None:
        prctl.set_no_new_privs()
        lockdown.add_filter(INVALID)

    assert in_child(act) == "seccomp: EINVAL"
    assert in_child(lambda report: lockdown.add_filter(None)) == "None"


def test_a_guard_that_cannot_be_joined_is_named() -> None:
    def act(report: int) -> None:
        prctl.set_no_new_privs()
        with socket.socket() as joining:
            lockdown.join_guard(joining, INVALID)

    assert in_child(act) == "path guard: EINVAL"


def test_imports_are_forbidden_until_the_end_of_the_block() -> None:
    name = "this"
    sys.modules.pop(name, None)
    with lockdown.forbid_imports(), pytest.raises(ImportError, match="before the seal"):
        importlib.import_module(name)
    importlib.import_module("colorsys")


@pytest.mark.parametrize(
    ("error", "layer", "number"),
    [
        (lockdown.SealError("landlock", OSError(1, "no")), "landlock", 1),
        (OSError(28, "full"), "seal", 28),
        (KeyError("walls"), "seal", 0),
    ],
)
def test_a_refusal_names_the_wall(error: Exception, layer: str, number: int) -> None:
    answer = lockdown.refusal(error)
    assert (answer["layer"], answer["errno"]) == (layer, number)
    assert type(error).__name__ in answer["message"]
