"""A commit whose process is killed before any of its steps: at the next start it was never begun,
or is done, whatever was put in its way meanwhile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sbx.workspace.snapshots.manifest import Nodes
from tests.crash.commit_trees import STEPS_MAX, Trees, killed, made
from tests.tiers import rows

JAIL = 4242  # uid and gid


def names(top: Path) -> list[str]:
    return sorted(os.listdir(top))


@contextmanager
def half_done(top: Path, at: int, **how: Any) -> Iterator[tuple[Trees, Nodes]]:
    """Trees whose commit was killed before its first step from `at` on that leaves some files as
    they were and others not, and the files as they were."""
    for step in range(at, STEPS_MAX):
        with made(top / str(step), **how) as trees:
            was = trees.now
            assert killed(trees.commit, step), "no later step leaves it half done"
            if trees.now not in (was, trees.wanted):
                yield trees, was
                return


@contextmanager
def exchanged(top: Path, *paths: str) -> Iterator[tuple[Trees, Nodes]]:
    """Trees whose commit was killed as soon as these had their new content, and what was there."""
    for step in range(1, STEPS_MAX):
        with made(top / str(step), in_tree=True) as trees:
            was = trees.now
            assert killed(trees.commit, step)
            now = trees.now
            if all(path in now and now[path] != was[path] for path in paths):
                yield trees, was
                return
    raise AssertionError("no step exchanges them all")


@pytest.mark.parametrize(
    "in_tree", rows([False, True], ci_tier=[True]), ids=["beside", "in the tree"]
)
def test_killed_before_any_step_all_is_undone_or_all_was_done(
    tmp_path: Path, in_tree: bool
) -> None:
    halves, done = 0, []
    for step in range(1, STEPS_MAX, 3 if in_tree else 1):
        with made(tmp_path / str(step), in_tree=in_tree) as trees:
            was, wanted = trees.now, trees.wanted
            if not killed(trees.commit, step):
                break
            seen = {path: node for path, node in trees.now.items() if ".sbx-" not in path}
            halves += seen not in (was, wanted)
            assert trees.roll_back()
            assert trees.now in (was, wanted), step
            assert not [name for name in names(trees.staging) if name.startswith(".sbx-")]
            done.append(trees.now == wanted)
    assert done == sorted(done)
    assert halves > 7
    assert any(done)


def test_undoing_may_be_killed_before_any_of_its_steps(tmp_path: Path) -> None:
    for step in (22, 30, 38):
        with half_done(tmp_path / f"from-{step}", step) as (trees, was):
            kills = 1
            while killed(trees.roll_back, kills):
                kills += 1
            assert kills > 5
            assert trees.now == was
            assert names(trees.staging) == []


@pytest.mark.parametrize("in_tree", [False, True], ids=["beside", "in the tree"])
def test_links_put_in_the_way_lead_nobody_out_of_the_tree(tmp_path: Path, in_tree: bool) -> None:
    with (
        made(tmp_path / "outside") as outside,
        half_done(tmp_path / "inside", 30, in_tree=in_tree) as (trees, _),
    ):
        untouched = outside.now
        for path in (*trees.path.glob("*/*"), *trees.path.glob("*")):
            path.rename(tmp_path / f"moved-{path.name}-{path.parent.name}")
            path.symlink_to(outside.path / path.relative_to(trees.path))
        trees.roll_back()
        assert outside.now == untouched


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_nothing_is_given_away_of_a_directory_put_in_the_place_of_the_stage(tmp_path: Path) -> None:
    """Code inside names a file that is not its own as that which is to be given to it."""
    with half_done(tmp_path, 40, in_tree=True, owner=(JAIL, JAIL)) as (trees, _):
        [stage] = trees.path.glob(".sbx-*")
        stage.rename(trees.path / "moved")
        stage.mkdir()
        os.chown(stage, JAIL, JAIL)
        foreign = tmp_path / "foreign"
        foreign.write_text("root's")
        for number in range(1, 30):
            (stage / f"{number}.again").hardlink_to(foreign)
        assert trees.roll_back()
        assert foreign.stat().st_uid == 0


def test_what_the_owner_of_a_directory_did_since_stays(tmp_path: Path) -> None:
    with exchanged(tmp_path, "becomes", "changed") as (trees, was):
        # As editors save: the old file is still there while the new one is written, so the new one
        # has another inode number.
        (trees.path / "becomes.new").write_text("mine")
        (trees.path / "becomes.new").replace(trees.path / "becomes")
        (trees.path / "changed").write_text("mine, in what was just made")
        assert trees.roll_back()
        now = trees.now
        [aside] = [path for path in now if path.startswith(".sbx-") and "/" not in path]
        kept = {path.read_text() for path in (trees.path / aside).iterdir() if path.is_file()}
        assert (trees.path / "becomes").read_text() == "mine"
        assert (trees.path / "changed").read_text() == "old"
        assert kept == {"mine, in what was just made"}
        assert [
            path.readlink() for path in (trees.path / aside).iterdir() if path.is_symlink()
        ] == [Path("old")]
        mine = {"becomes", "changed"}
        assert {path: was[path] for path in was.keys() - mine} == {
            path: now[path] for path in now.keys() - mine if not path.startswith(aside)
        }
        assert names(trees.staging) == []


def test_a_directory_of_the_host_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    with half_done(tmp_path, 38, in_tree=True) as (trees, was):
        trees.path.rename(tmp_path / "unmounted")
        trees.path.mkdir()  # where it is mounted, as a rule
        assert not trees.roll_back()
        trees.path.rmdir()
        (tmp_path / "unmounted").rename(trees.path)
        assert trees.roll_back()
        assert trees.now == was
