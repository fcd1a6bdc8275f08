"""Whether a store is the one of its data directory: every combination, and the hints."""

import errno
from pathlib import Path

import pytest

from sbx.errors import Unavailable
from sbx.store import Store, marks
from sbx.store.marks import Mark, following, judge, refusal

STORE = Path("/var/lib/a b/store.sqlite")
OURS, LATER, ANOTHER = Mark("a", 5), Mark("a", 6), Mark("b", 9)


@pytest.mark.parametrize(
    ("exists", "store", "directory", "has_sandboxes", "verdict"),
    [
        (False, None, None, False, "create"),
        (False, None, None, True, "store_missing"),
        (False, None, OURS, False, "store_missing"),
        (False, None, OURS, True, "store_missing"),
        (True, None, None, False, "adopt"),
        (True, None, None, True, "adopt"),  # an earlier version of sbx
        (True, OURS, None, False, "adopt"),  # killed in its first start
        (True, OURS, None, True, "adopt"),
        (True, None, OURS, False, "store_older"),
        (True, None, OURS, True, "store_older"),
        (True, OURS, ANOTHER, False, "store_of_another"),
        (True, ANOTHER, OURS, True, "store_of_another"),
        (True, OURS, LATER, False, "store_older"),
        (True, OURS, LATER, True, "store_older"),
        (True, OURS, OURS, True, "continue"),
        (True, LATER, OURS, True, "continue"),  # killed between the two writes
        (True, LATER, OURS, False, "continue"),
    ],
)
def test_each_combination_has_its_verdict(
    exists: bool, store: Mark | None, directory: Mark | None, has_sandboxes: bool, verdict: str
) -> None:
    assert judge(store, directory, exists=exists, has_sandboxes=has_sandboxes) == verdict


def test_a_kill_at_any_moment_is_never_a_refusal() -> None:
    """The store is written first, and then the directory, at each start and each end."""
    store = directory = None
    for _ in range(5):
        mark = following(directory, store)
        store = mark
        assert judge(store, directory, exists=True, has_sandboxes=True) in ("adopt", "continue")
        directory = mark
        assert judge(store, directory, exists=True, has_sandboxes=True) == "continue"


def test_the_next_mark_is_later_than_all_and_keeps_the_id() -> None:
    assert following(OURS, LATER) == Mark("a", 7)
    assert following(OURS, ANOTHER) == Mark("a", 10)
    assert following(None, ANOTHER) == Mark("b", 10)
    new, other = following(None, None), following()
    assert (new.generation, len(new.id)) == (1, 32)
    assert new.id != other.id


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("store_missing", "sbx store restore --data-dir '/var/lib/a b' --empty"),
        ("store_older", "sbx store restore --data-dir '/var/lib/a b' '/var/lib/a b/store.sqlite'"),
        ("store_of_another", "sbx store restore --data-dir '/var/lib/a b' --force"),
    ],
)
def test_each_refusal_names_the_command_to_run(verdict: marks.Verdict, words: str) -> None:
    error = refusal(verdict, STORE, OURS, LATER)
    assert error is not None
    assert error.code == verdict
    assert words in (error.hint or "")


@pytest.mark.parametrize("verdict", ["create", "adopt", "continue"])
def test_a_store_that_may_be_used_is_no_refusal(verdict: marks.Verdict) -> None:
    assert refusal(verdict, STORE, OURS, OURS) is None


def test_the_mark_of_a_directory_is_kept_and_damage_is_named(tmp_path: Path) -> None:
    assert marks.read_from_directory(tmp_path) is None
    marks.write_to_directory(tmp_path, OURS)
    marks.write_to_directory(tmp_path, LATER)
    assert marks.read_from_directory(tmp_path) == LATER
    assert [item.name for item in tmp_path.iterdir()] == [marks.FILE]
    assert (tmp_path / marks.FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / marks.FILE).write_text("{")
    with pytest.raises(Unavailable, match="cannot be read"):
        marks.read_from_directory(tmp_path)


@pytest.mark.parametrize("step", ["write_to_store", "write_to_directory"])
async def test_start_that_is_cut_off_at_a_mark_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The directory is never ahead of its store: the next start would refuse the store as older."""
    await (await Store.open_in(tmp_path)).close()
    before = marks.read_from_directory(tmp_path)

    def cut_off(*_: object) -> None:
        raise OSError(errno.EIO, "cut off")

    with monkeypatch.context() as patch:
        patch.setattr(marks, step, cut_off)
        with pytest.raises(Unavailable):
            await Store.open_in(tmp_path)
    assert marks.read_from_directory(tmp_path) == before
    await (await Store.open_in(tmp_path)).close()
