"""A tree behaves like a dictionary from paths to bytes, whatever is written and deleted."""

import os
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from sbx.errors import NotFound
from sbx.workspace import safe_open
from sbx.workspace.tree import Relative, Tree
from tests.tiers import examples

name = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=20
).filter(lambda text: text not in (".", ".."))
# Directories and files have different first letters, so that no name is wanted as both.
path = st.tuples(st.lists(name.map("d".__add__), max_size=3), name.map("f".__add__)).map(
    lambda parts: (*parts[0], parts[1])
)
action = st.tuples(st.sampled_from(["write", "delete"]), path, st.binary(max_size=50))


@settings(max_examples=examples(30))
@given(st.lists(action, max_size=12), st.sampled_from([safe_open.by_openat2, safe_open.by_walk]))
def test_tree_reads_what_was_written_last_and_nothing_else(
    actions: list[tuple[str, Relative, bytes]], opener: safe_open.Opener
) -> None:
    with tempfile.TemporaryDirectory() as root:
        tree = Tree(os.open(root, os.O_PATH), view="/workspace", opener=opener)
        model: dict[Relative, bytes] = {}
        for verb, where, data in actions:
            if verb == "write":
                assert tree.write(where, data, max_bytes=100) == len(data)
                model[where] = data
            elif model.pop(where, None) is not None:
                tree.delete(where)
        for where, data in model.items():
            assert tree.read(where, max_bytes=100) == data
        listed = {entry.path for entry in tree.list(max_depth=9) if entry.kind == "file"}
        assert listed == {"/".join(("/workspace", *where)) for where in model}
        assert tree.measure().files == len(model)
        for _, where, _ in actions:
            if where not in model:
                try:
                    tree.read(where, max_bytes=100)
                except NotFound:
                    continue
                raise AssertionError(f"{where} was deleted and can be read")
        tree.close()
