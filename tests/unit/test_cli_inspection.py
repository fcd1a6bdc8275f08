"""What `sbx inspect` makes of a receipt, for a person."""

from typing import Any

import pytest

from sbx.cli.inspect import changes, walls
from sbx.cli.output import size


def receipt(**chosen: Any) -> dict[str, Any]:
    wall = {"demanded": "best-effort", "weaker": False}
    return {
        "network": "proxy: 2 hosts",
        "limits": {"memory_max": 1 << 30, "tasks_max": 128, "cpu_quota": 0.5, "io": []},
        "seccomp": {"default": "a" * 64, "strict": "b" * 64},
        "walls": [
            {**wall, "name": "seccomp", "means": "filter mode"},
            {**wall, "name": "memory", "means": "cgroup v2"},
            {**wall, "name": "cpu", "means": "cgroup v2"},
            {**wall, "name": "disk", "means": "watched", "weaker": True},
        ],
        "changed": {},
        **chosen,
    }


def test_each_wall_is_told_with_what_it_comes_to() -> None:
    assert walls(receipt()) == [
        ("network", "", "proxy: 2 hosts"),
        ("seccomp", "best-effort", f"filter mode: default {'a' * 12}, strict {'b' * 12}"),
        ("memory", "best-effort", "1 GiB, by cgroup v2"),
        ("cpu", "best-effort", "0.5 CPU, by cgroup v2"),
        ("disk", "best-effort", "weaker: watched"),
    ]
    without = receipt(limits={"memory_max": None})
    assert ("memory", "best-effort", "cgroup v2") in walls(without)


def test_what_changed_is_told_as_it_was_and_is() -> None:
    changed = {
        "filters": {"was": 2, "now": 1},
        "in_group": {"was": True, "now": False},
        "namespaces": {"was": {"net": 1}, "now": {"net": 2}},
    }
    assert changes(receipt(changed=changed)) == [
        "filters is 1, and was 2",
        "in_group is false, and was true",
        "namespaces is net 2, and was net 1",
    ]
    assert changes(receipt()) == []


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (1 << 60, "1048576 TiB")],
)
def test_a_size_is_short(count: int, said: str) -> None:
    assert size(count) == said
