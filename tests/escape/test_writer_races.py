"""Writers of the host whose target directory is exchanged for a link while they write: restore from
the quarantine, commit of a dry run, restore of a checkpoint, and the copy of an import.

test_exchange_races.py has the calls of the file API, with the controls of the racer.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from racing import racing

from sbx.errors import Broken, SbxError
from sbx.workspace import copy, quarantine
from sbx.workspace.quarantine import Quarantine
from sbx.workspace.snapshots.apply import commit
from sbx.workspace.snapshots.copy import freeze
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import changes
from sbx.workspace.snapshots.scan import Bounds, ScanScope, look
from sbx.workspace.tree import Tree

BOUNDS = Bounds(1 << 20)
PATH = ("d", "sub", "planted")
ROUNDS, FULL_ROUNDS = 25, 400


@dataclass
class Raced:
    """`root` is the directory that is raced, and `outside` has what must not change."""

    root: Path
    outside: Path
    other: Path
    tree: Tree

    def seen(self) -> dict[str, tuple[int, bytes]]:
        files = [path for path in self.outside.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mode, path.read_bytes()) for path in files}


@pytest.fixture
def raced(tmp_path: Path) -> Iterator[Raced]:
    root, outside, other = (tmp_path / name for name in ("root", "outside", "other"))
    for top in (root, outside, other):
        (top / "d/sub").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    (outside / "sub").mkdir()
    (outside / "sub/f").write_text("secret")
    with Tree.at(root, view="/workspace") as tree:
        tree.durable = False
        yield Raced(root, outside, other, tree)


def _restore(raced: Raced, number: int) -> None:
    store, name = raced.other / "store", secrets.token_hex(8)
    fd = os.open(raced.root, os.O_PATH | os.O_DIRECTORY)
    try:
        used = Quarantine.open(store, raced.root, fd, None)
    finally:
        os.close(fd)
    record = {"path": "/".join(PATH), "name": PATH[-1], "program": "direnv", "kind": "file"}
    (used.inside / "records" / f"{name}.json").write_text(json.dumps(record))
    (used.inside / "items" / name).write_text("planted")
    used.close()
    try:
        quarantine.restore(store, name)
    finally:
        with suppress(SbxError):
            quarantine.drop(store, name)


def _commit(raced: Raced, number: int) -> None:
    """A dry run and a checkpoint write their changes in the same way."""
    source, staging = raced.other, raced.other.parent / f"staging-{number}"
    staging.mkdir(exist_ok=True)
    (source / "d/sub/planted").write_text(f"planted {number}")
    with Tree.at(source, view="/workspace") as wanted:
        before = look(raced.tree, ScanScope(), BOUNDS).nodes
        changed = changes(before, look(wanted, ScanScope(), BOUNDS).nodes)
        fd = os.open(staging, os.O_PATH)
        try:
            commit(changed, before, raced.tree, wanted, Journal(fd, in_tree=True))
        finally:
            os.close(fd)


def _freeze(raced: Raced, number: int) -> None:
    target = raced.other / f"frozen-{number}"
    target.mkdir()
    with Tree.at(target, view="/workspace") as tree:
        freeze(raced.tree, tree, ScanScope(), BOUNDS)
    found = [path.read_text() for path in target.rglob("*") if path.is_file()]
    assert "secret" not in found


def _copy(raced: Raced, number: int) -> None:
    (raced.other / "planted").write_text("planted")
    with Tree.at(raced.other, view="/uploads") as source:
        copy.copy(
            source, ("planted",), raced.tree, PATH, file_max=100, total_max=100, overwrite=True,
            entries_max=10, deadline_s=5,
        )  # fmt: skip


WRITERS: dict[str, Callable[[Raced, int], None]] = {
    "quarantine restore": _restore,
    "commit of a dry run or checkpoint": _commit,
    "copy of a checkpoint": _freeze,
    "copy between trees": _copy,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_of_the_host_never_follows_an_exchanged_directory(
    raced: Raced, writer: str, pytestconfig: pytest.Config
) -> None:
    """CVE-2026-39861: code made a link inside, and a writer of the host followed it."""
    rounds = FULL_ROUNDS if pytestconfig.getoption("--full") else ROUNDS
    before = raced.seen()
    number = done = 0
    with racing(raced.root, raced.outside, "directory", "depth") as racer:
        start = racer.swaps
        while number < rounds or not done or racer.swaps == start:
            assert number < 40 * rounds, "no call was served"
            number += 1
            try:
                WRITERS[writer](raced, number)
                done += 1
            except SbxError as error:
                # Exchanges that go on keep a commit from its undo, in the racer's own files.
                if isinstance(error, Broken) and error.code != "commit_not_undone":
                    raise
    assert raced.seen() == before
    assert not any("planted" in name for name in os.listdir(raced.outside))
