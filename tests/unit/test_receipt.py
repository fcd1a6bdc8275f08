"""The receipt repeats what linux says, and a jail that lacks a planned wall is refused."""

from dataclasses import replace
from typing import Any

import pytest

from sbx.errors import CannotEnforce
from sbx.isolation.filters import Filter
from sbx.isolation.plan import LaunchPlan, Seal, Wall
from sbx.isolation.receipt import Receipt, make_receipt

SEAL = Seal(True, ("/",), ("/workspace",), (), (), None)
PLAN = LaunchPlan(
    bwrap="/usr/bin/bwrap",
    options=frozenset(),
    mounts=(),
    own_mounts=(),
    files=(),
    environment=(),
    command=(),
    filter=Filter("default", b"", "d" * 64),
    seal=SEAL,
    walls=(
        Wall("memory", "best-effort", "cgroup v1"),
        Wall("cpu", "best-effort", "…", weaker=True),
    ),
)
STRICT = replace(PLAN, seal=replace(SEAL, kernel_filter=Filter("strict", b"", "5" * 64)))
NAMESPACES = {"user": 1, "mnt": 2, "pid": 3}
LIMITS = {"memory_max": 1 << 30, "tasks_max": 128, "cpu_quota": 1.0, "io": []}


def facts(**changes: Any) -> dict[str, Any]:
    process = {
        "pid": 7,
        "uid": 1_900_000_001,
        "capabilities": 0,
        "no_new_privs": True,
        "seccomp": 2,
        "filters": 1,
        "namespaces": NAMESPACES,
    }
    return {"pid1": process, "kernel": {**process, **changes}, "limits": LIMITS}


def test_a_receipt_says_what_linux_said() -> None:
    assert make_receipt(PLAN, facts(), landlock_abi=4) == Receipt(
        path="cold",
        host_uid=1_900_000_001,
        namespaces=NAMESPACES,
        no_new_privs=True,
        capabilities=0,
        seccomp={"default": "d" * 64},
        landlock_abi=4,
        network="none",
        limits=LIMITS,
        walls=(
            {"name": "memory", "demanded": "best-effort", "means": "cgroup v1", "weaker": False},
            {"name": "cpu", "demanded": "best-effort", "means": "…", "weaker": True},
        ),
    )


def test_a_second_filter_is_named_beside_the_first() -> None:
    receipt = make_receipt(STRICT, facts(filters=2), landlock_abi=4)
    assert receipt.seccomp == {"default": "d" * 64, "strict": "5" * 64}


@pytest.mark.parametrize("process", ["pid1", "kernel"])
@pytest.mark.parametrize(
    ("fact", "layer"),
    [
        ({"uid": 0}, "namespaces"),
        ({"capabilities": 1 << 21}, "namespaces"),
        ({"no_new_privs": False}, "seccomp"),
        ({"seccomp": 0}, "seccomp"),
        ({"seccomp": 1}, "seccomp"),
    ],
)
def test_a_process_without_a_wall_is_refused(
    process: str, fact: dict[str, Any], layer: str
) -> None:
    found = facts()
    found[process] = {**found[process], **fact}
    with pytest.raises(CannotEnforce) as raised:
        make_receipt(PLAN, found, landlock_abi=4)
    assert raised.value.details["layer"] == layer
    assert raised.value.hint


def test_a_kernel_that_cannot_be_seen_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="cannot be seen"):
        make_receipt(PLAN, {**facts(), "kernel": None}, landlock_abi=4)


def test_a_kernel_without_its_second_filter_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="second filter"):
        make_receipt(STRICT, facts(filters=1), landlock_abi=4)


def test_a_guest_that_entered_no_landlock_domain_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="domain"):
        make_receipt(PLAN, facts(), landlock_abi=0)


def test_a_plan_without_landlock_asks_for_no_domain() -> None:
    plan = replace(PLAN, seal=replace(SEAL, landlock=False))
    assert make_receipt(plan, facts(), landlock_abi=0).landlock_abi == 0


def test_a_receipt_is_plain_data() -> None:
    assert make_receipt(PLAN, facts(), landlock_abi=4).to_dict()["limits"] == LIMITS
