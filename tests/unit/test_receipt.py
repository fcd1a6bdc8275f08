"""The receipt repeats what linux says, and a jail that lacks a planned wall is refused."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from sbx.errors import CannotEnforce
from sbx.isolation.launch_plan import LaunchPlan, Seal, Wall
from sbx.isolation.masking import Masks
from sbx.isolation.receipt import Receipt, make_receipt, read_again
from sbx.isolation.seccomp import Filter

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
STRICT = structs.replace(
    PLAN, seal=structs.replace(SEAL, kernel_filter=Filter("strict", b"", "5" * 64))
)
NAMESPACES = {"user": 1, "mnt": 2, "pid": 3}
HOST = {"user": 11, "mnt": 12, "pid": 13}
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
    assert make_receipt(PLAN, facts(), host=HOST, landlock_abi=4) == Receipt(
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
            {
                "name": "unix_sockets",
                "demanded": "own",
                "means": "no directory of the host is shown",
                "weaker": False,
            },
        ),
        host_namespaces=HOST,
        seccomp_mode=2,
        filters=1,
    )


SHOWING = structs.replace(PLAN, host_directories=("/workspace",), masks=True)
NO_SOCKETS = structs.replace(
    SHOWING,
    unix_sockets="none",
    seal=structs.replace(SEAL, last_filter=Filter("no_unix", b"", "0" * 64)),
)


@pytest.mark.parametrize(
    ("plan", "abi", "masks", "expected"),
    [
        (SHOWING, 7, Masks(3, True), ("own", "masks: 3 sockets and FIFOs", True)),
        (SHOWING, 7, Masks(0, False), ("own", "masks: 0 sockets and FIFOs, not all", True)),
        (
            SHOWING,
            9,
            Masks(3, True),
            ("own", "Landlock: connections to the jail's own; masks: 3 sockets and FIFOs", False),
        ),
        (
            structs.replace(SHOWING, masks=False),
            7,
            None,
            ("own", "looked for at the start: none there", True),
        ),
        (
            NO_SOCKETS,
            7,
            Masks(1, True),
            ("none", "seccomp: no Unix socket but pairs; masks: 1 sockets and FIFOs", False),
        ),
        (
            structs.replace(NO_SOCKETS, masks=False),
            7,
            None,
            ("none", "seccomp: no Unix socket but pairs; FIFOs are not covered", True),
        ),
        (
            structs.replace(SHOWING, masks=False, unix_sockets="any"),
            9,
            None,
            ("any", "nothing: the policy allows the host's", False),
        ),
    ],
)
def test_receipt_names_what_keeps_sockets_of_the_host_away(
    plan: LaunchPlan, abi: int, masks: Masks | None, expected: tuple[str, str, bool]
) -> None:
    receipt = make_receipt(plan, facts(filters=2), host=HOST, landlock_abi=abi, masks=masks)
    demanded, means, weaker = expected
    assert receipt.walls[-1] == {
        "name": "unix_sockets",
        "demanded": demanded,
        "means": means,
        "weaker": weaker,
    }


def test_jail_whose_host_sockets_were_not_covered_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="not covered"):
        make_receipt(SHOWING, facts(), host=HOST, landlock_abi=7)


def test_jail_without_its_filter_of_unix_sockets_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="lacks its last filter"):
        make_receipt(NO_SOCKETS, facts(), host=HOST, landlock_abi=7, masks=Masks(0, True))


def test_a_second_filter_is_named_beside_the_first() -> None:
    receipt = make_receipt(STRICT, facts(filters=2), host=HOST, landlock_abi=4)
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
        make_receipt(PLAN, found, host=HOST, landlock_abi=4)
    assert raised.value.details["layer"] == layer
    assert raised.value.hint


def test_a_kernel_that_cannot_be_seen_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="cannot be seen"):
        make_receipt(PLAN, {**facts(), "kernel": None}, host=HOST, landlock_abi=4)


def test_a_kernel_without_its_second_filter_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="second filter"):
        make_receipt(STRICT, facts(filters=1), host=HOST, landlock_abi=4)


def test_a_guest_that_entered_no_landlock_domain_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="domain"):
        make_receipt(PLAN, facts(), host=HOST, landlock_abi=0)


def test_a_plan_without_landlock_asks_for_no_domain() -> None:
    plan = structs.replace(PLAN, seal=structs.replace(SEAL, landlock=False))
    assert make_receipt(plan, facts(), host=HOST, landlock_abi=0).landlock_abi == 0


def test_a_receipt_is_plain_data() -> None:
    assert make_receipt(PLAN, facts(), host=HOST, landlock_abi=4).to_dict()["limits"] == LIMITS


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_kernel_in_a_namespace_of_the_host_is_refused(name: str) -> None:
    with pytest.raises(CannotEnforce, match=f"the {name} namespace of the host"):
        make_receipt(PLAN, facts(), host={**HOST, name: NAMESPACES[name]}, landlock_abi=4)


def again(found: dict[str, Any]) -> Receipt:
    standing = make_receipt(PLAN, facts(), host=HOST, landlock_abi=4, read_at=1.0)
    return read_again(standing, found, host=HOST, read_at=2.0)


def test_a_receipt_that_is_read_again_has_changed_nothing_but_its_time() -> None:
    standing = make_receipt(PLAN, facts(), host=HOST, landlock_abi=4, read_at=1.0)
    assert again(facts()) == replace(standing, read_at=2.0)


@pytest.mark.parametrize(
    ("fact", "name", "now"),
    [
        ({"uid": 0}, "host_uid", 0),
        ({"capabilities": 4}, "capabilities", 4),
        ({"no_new_privs": False}, "no_new_privs", False),
        ({"seccomp": 0}, "seccomp_mode", 0),
        ({"filters": 3}, "filters", 3),
        ({"namespaces": {**NAMESPACES, "mnt": 12}}, "namespaces", {**NAMESPACES, "mnt": 12}),
    ],
)
def test_what_is_otherwise_than_at_the_start_is_named(
    fact: dict[str, Any], name: str, now: Any
) -> None:
    found = again(facts(**fact))
    assert {one: change["now"] for one, change in found.changed.items()} == {name: now}
    assert getattr(found, name) == now


def test_a_limit_that_is_otherwise_now_is_named() -> None:
    wider = {**LIMITS, "tasks_max": None}
    found = again({**facts(), "limits": wider, "in_group": False})
    assert found.changed == {
        "limits": {"was": LIMITS, "now": wider},
        "in_group": {"was": True, "now": False},
    }


def test_a_weaker_wall_of_pid_1_counts_too() -> None:
    found = facts()
    found["pid1"] = {**found["pid1"], "capabilities": 1 << 21, "seccomp": 0}
    assert set(again(found).changed) == {"capabilities", "seccomp_mode"}


def test_a_digest_is_of_all_that_is_said() -> None:
    one = make_receipt(PLAN, facts(), host=HOST, landlock_abi=4)
    assert one.digest == replace(one).digest
    assert one.digest != replace(one, landlock_abi=5).digest
