"""The class host_executables of `sbx doctor --attack`: held, and seen to get through without."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attacking import altered, one_path

from sbx import Runtime
from sbx.doctor.attacks import host_executables
from sbx.doctor.attacks.attack import Attack, Outcome
from sbx.doctor.attacks.host_executables import HOST_EXECUTABLES, MEANS, plant, subdirectory
from sbx.doctor.attacks.runner import results_of
from sbx.policy import load
from sbx.workspace import quarantine
from tests import disks


@pytest.fixture
async def runtime(
    started_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Runtime]:
    """With a quarantine of its own: races leave thousands of items in the other one."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    async with Runtime() as runtime:
        yield runtime


def attacks_by(means: tuple[str, ...], *, step: int = 1) -> list[Attack]:
    """Return the attacks by these means with every `step`-th name."""
    places = [one.code for one in HOST_EXECUTABLES if one.act == ("open",)][::step]
    return [one for one in HOST_EXECUTABLES if one.act[0] in means and one.code in places]


# Both put the guard up in a way of their own. The CI tier tries each means with few names, and each
# name by two.
@pytest.mark.parametrize("started_by", ["fork", "cold"], indirect=True, scope="module")
async def test_every_planted_name_is_held_and_nothing_is_left(
    runtime: Runtime,
    started_by: str,
    pytestconfig: pytest.Config,
) -> None:
    policy = load("default")
    means = MEANS if started_by == "fork" else ("open", "a command")
    step = 1 if started_by == "cold" or pytestconfig.getoption("--full") else 12
    attacks = attacks_by(means, step=step)
    results = results_of(attacks, await plant(runtime, policy, None, attacks), policy)
    assert quarantine.items(runtime.settings.protection.quarantines) == []
    ends = {one.attack.name: one.end for one in results if one.attack.act != ("ioctl",)}
    assert ends == dict.fromkeys(ends, Outcome.HELD)
    # Only btrfs has the call.
    by_ioctl = {one.end for one in results if one.attack.act == ("ioctl",)}
    assert by_ioctl in (set(), {Outcome.HELD}, {Outcome.NOT_APPLICABLE})


@one_path("fork")  # a control
async def test_without_the_guard_every_name_gets_through(
    runtime: Runtime, pytestconfig: pytest.Config
) -> None:
    policy = load("default").model_copy(update={"host_executables": "allow"})
    step = 1 if pytestconfig.getoption("--full") else 12
    means = tuple(one for one in MEANS if one != "ioctl")
    attacks = attacks_by(means, step=step)
    results = results_of(attacks, await plant(runtime, policy, None, attacks), policy)
    assert {one.end for one in results} == {Outcome.ESCAPED}


@one_path("fork")
async def test_names_are_not_tried_where_nothing_can_be_written(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 380 attacks counted as held in a directory that was read-only for its owner, and half of
    them under `strict`, which runs no command (holes 1.11)."""

    @contextmanager
    def read_only(directory: Path | None) -> Iterator[Path]:
        with subdirectory(directory) as top:
            top.chmod(0o555)
            yield top
            top.chmod(0o755)

    monkeypatch.setattr(host_executables, "subdirectory", read_only)
    tried = ("open", "link", "a command")
    attacks = attacks_by(tried, step=12)
    default = load("default")
    strict = load("strict").model_copy(update={"walls": default.walls})  # also without cgroups
    for policy, exempt in ((default, ()), (strict, ("link", "a command"))):
        results = results_of(attacks, await plant(runtime, policy, None, attacks), policy)
        by_means: dict[str, set[Outcome]] = {}
        for result in results:
            by_means.setdefault(result.attack.act[0], set()).add(result.end)
        assert by_means == {
            means: {Outcome.NOT_APPLICABLE if means in exempt else Outcome.NOT_TRIED}
            for means in tried
        }


@pytest.fixture  # before the runtime, whose broker does not see later mounts
def btrfs(own_temporary_directory: Path) -> Iterator[Path]:
    with disks.mounted("btrfs", own_temporary_directory) as top:
        yield top


@pytest.mark.full_tier
@pytest.mark.needs("root", "btrfs")
@one_path("fork")  # a control
async def test_without_the_filter_the_ioctl_plants_names_on_btrfs(
    btrfs: Path, runtime: Runtime
) -> None:
    attacks = attacks_by(("ioctl",))
    policy = load("default").model_copy(update={"host_executables": "allow"})
    with altered("seccomp"):
        results = results_of(attacks, await plant(runtime, policy, btrfs, attacks), policy)
    assert {one.end for one in results} == {Outcome.ESCAPED}
