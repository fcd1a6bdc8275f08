"""What makes one tree another one: told by `changes`, done by `commit`, on real directories."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sbx.workspace.rmtree import empty_directory
from sbx.workspace.snapshots.apply import commit
from sbx.workspace.snapshots.copy import freeze
from sbx.workspace.snapshots.diff import unified
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import changes, needs_digest, relative, with_digests
from sbx.workspace.snapshots.scan import Bounds, ScanScope, digest, look
from sbx.workspace.tree import Tree
from tests.tiers import examples

BOUNDS = Bounds(1 << 30)
name = st.sampled_from(["a", "b", "ü", "with space", "\udc80odd"])
file = st.tuples(
    st.just("file"), st.sampled_from([b"", b"x", b"y", b"long" * 100]), st.sampled_from([6, 4])
)
link = st.tuples(st.just("link"), st.sampled_from([b"/etc/passwd", b"../..", b"a"]), st.just(0))
tree = st.recursive(
    st.dictionaries(name, file | link, max_size=3),
    lambda below: st.dictionaries(
        name, file | link | st.tuples(st.just("dir"), below, st.sampled_from([7, 5])), max_size=4
    ),
    max_leaves=8,
)


@contextmanager
def directory() -> Iterator[Path]:
    """`tempfile` itself does not get rid of a link in a directory that nobody may write to."""
    with tempfile.TemporaryDirectory() as top:
        yield Path(top)
        fd = os.open(top, os.O_RDONLY)
        try:
            assert empty_directory(fd, 10)
        finally:
            os.close(fd)


def build(top: Path, what: Mapping[str, tuple[str, object, int]]) -> Path:
    top.mkdir(exist_ok=True)
    for one, (kind, content, mode) in what.items():
        path = top / os.fsdecode(one.encode("utf-8", "surrogateescape"))
        if kind == "dir":
            assert isinstance(content, dict)
            build(path, content)
            path.chmod(mode << 6)
        elif kind == "link":
            assert isinstance(content, bytes)
            os.symlink(content, os.fsencode(path))
        else:
            assert isinstance(content, bytes)
            path.write_bytes(content)
            path.chmod(mode << 6)
            os.utime(path, ns=(1, mode))
    return top


@settings(max_examples=examples(60))
@given(tree, tree)
def test_the_changes_between_any_two_trees_make_the_one_the_other(
    one: Mapping[str, tuple[str, object, int]], other: Mapping[str, tuple[str, object, int]]
) -> None:
    with directory() as top:
        before, after = build(top / "before", one), build(top / "after", other)
        (top / "staging").mkdir()
        with (
            Tree.at(before, view="/workspace") as target,
            Tree.at(after, view="/x") as source,
            Tree.at(top / "staging", view="/y") as staging,
        ):
            journal = Journal(staging.fd, in_tree=True)
            now, then = (
                look(target, ScanScope(), BOUNDS).nodes,
                look(source, ScanScope(), BOUNDS).nodes,
            )
            unsure = needs_digest(now, then)
            known = with_digests(now, unsure, lambda path: digest(target, relative(path)))
            wanted = with_digests(then, unsure, lambda path: digest(source, relative(path)))
            commit(changes(known, wanted), now, target, source, journal)
            made = look(target, ScanScope(), BOUNDS).nodes
            assert made == then
            for path, node in made.items():
                if node.kind == "file":
                    assert digest(target, relative(path)) == digest(source, relative(path))
            assert sorted(os.listdir(before)) == sorted(os.listdir(after))  # nothing of ours


@settings(max_examples=examples(30))
@given(tree)
def test_a_frozen_copy_is_the_same_tree(what: Mapping[str, tuple[str, object, int]]) -> None:
    with directory() as top:
        made = build(top / "made", what)
        (top / "copy").mkdir()
        with Tree.at(made, view="/x") as source, Tree.at(top / "copy", view="/x") as target:
            base, frozen = freeze(source, target, ScanScope(), BOUNDS)
            assert base.nodes == frozen.nodes
            assert base.left_out == frozen.left_out == ()
            assert changes(frozen.nodes, look(target, ScanScope(), BOUNDS).nodes) == []


line = st.sampled_from(["a", "b", "c", "d"])


@settings(max_examples=examples(200))
@given(st.lists(line, max_size=12), st.lists(line, max_size=12))
def test_a_diff_says_how_to_get_the_new_lines(old: list[str], new: list[str]) -> None:
    applied: list[str] = []
    at = 0
    for answer in unified(old, new):
        if answer.startswith("@@"):
            start, count = answer.split()[1][1:].split(",")
            first = int(start) - (count != "0")
            applied += old[at:first]
            at = first
            continue
        if answer[0] in " -":
            assert old[at] == answer[1:]
            at += 1
        if answer[0] in " +":
            applied.append(answer[1:])
    assert applied + old[at:] == new
