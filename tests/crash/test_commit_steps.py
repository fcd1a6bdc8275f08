"""Changes are made all or none, whichever step of the host fails."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.errors import Broken, Conflict, Unavailable
from sbx.workspace.snapshots import apply, journal, recover
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import changes
from sbx.workspace.snapshots.scan import Bounds, ScanScope, TreeScan, sealed
from sbx.workspace.tree import Tree
from tests.crash.commit_trees import STEPS_MAX, Trees, failing, made


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Trees]:
    with made(tmp_path) as trees:
        yield trees


def test_whichever_step_fails_nothing_was_changed(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trees.wanted
    for step in range(STEPS_MAX):
        before = trees.now
        with monkeypatch.context() as patch:
            steps = failing(step, 1)
            steps.put_in(patch)
            try:
                trees.commit()
            except Unavailable as error:
                answer = error.code
            else:
                if steps.done <= step:
                    break
                assert trees.now == wanted  # it failed of what may fail: to clear up
                assert trees.roll_back()
                break
        assert (answer, trees.now == before) == ("no_space", True), f"after the step {step}"
        assert os.listdir(trees.staging) == []
    assert step > 20
    assert trees.now == wanted
    assert os.listdir(trees.staging) == []


def test_no_directory_of_others_is_emptied_in_place_of_the_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tree itself code inside sees the name, and may give it to another one."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("kept")
    (tmp_path / "staging").mkdir()
    staging = os.open(tmp_path / "staging", os.O_PATH)
    with Tree.at(tmp_path, view="/workspace") as target:
        with recover.begin_commit(target, Journal(staging, in_tree=True)):
            [name] = [one for one in os.listdir(tmp_path) if one.startswith(".sbx-")]
            (tmp_path / name / "1").mkdir()
            (tmp_path / name).rename(tmp_path / "moved")
            (tmp_path / "foreign").rename(tmp_path / name)
        assert (tmp_path / name / "file").read_text() == "kept"
        assert list((tmp_path / "moved").iterdir()) == []
    os.close(staging)


def test_what_cannot_be_undone_is_told_and_nothing_of_it_is_thrown_away(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trees.now
    with monkeypatch.context() as patch:
        failing(30, STEPS_MAX).put_in(patch)
        with pytest.raises(Broken) as raised:
            trees.commit()
    assert raised.value.code == "commit_not_undone"
    assert trees.now != before
    assert os.listdir(trees.staging) != []
    assert trees.roll_back()  # once there is space again
    assert trees.now == before
    assert os.listdir(trees.staging) == []


@pytest.mark.parametrize("how", ["written", "replaced", "link"])
def test_what_code_inside_did_to_a_stage_in_the_tree_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where the project lies on another mount, the stage lies in the project, and live code of the
    same uid changed a staged file between the comparison and the rename."""
    with made(tmp_path, in_tree=True) as trees:
        before = trees.now
        bounds = Bounds(1 << 30)
        survey = TreeScan(trees.source, ScanScope(), bounds)
        wanted = [sealed(trees.source, one, survey) for one in changes(before, trees.wanted)]

        def meddle(_fd: int) -> None:
            monkeypatch.undo()  # once: all is staged and on the disk now
            for path in next(trees.path.glob(".sbx-*")).iterdir():
                if how == "link" and path.is_symlink():
                    path.unlink()
                    path.symlink_to("/elsewhere")
                elif how == "written" and path.is_file() and not path.is_symlink():
                    path.write_text("x" * path.stat().st_size)
                elif how == "replaced" and path.is_file() and not path.is_symlink():
                    path.unlink()
                    path.write_text("another")

        monkeypatch.setattr(journal, "syncfs", meddle)
        with pytest.raises(Conflict) as raised:
            apply.commit(wanted, before, trees.target, trees.source, trees.journal)
        assert raised.value.code == "workspace_changed"
        after = trees.now
        aside = {path for path in after if path.startswith(".sbx-")}
        assert {path: after[path] for path in after.keys() - aside} == before
