"""Search over any tree finds what a plain look at it finds."""

import fnmatch
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbx.workspace.edit import replaced_bytes
from sbx.workspace.files import Files
from sbx.workspace.tree import Tree
from tests.tiers import examples

NAMES = st.sampled_from(["a", "b.py", "ab", "ü.py", "x", "[c]", "a b"])
PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), max_size=8)
PATTERNS = st.lists(
    st.sampled_from(["*", "?", "a", "b", ".py", "[a-b]", "[!a]", "ü"]), min_size=1, max_size=4
).map("".join)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(PATHS, PATTERNS)
def test_a_name_is_found_as_fnmatch_would(paths: list[str], pattern: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        for path in paths:
            try:
                (top / path).parent.mkdir(parents=True, exist_ok=True)
                (top / path).write_text(path)
            except OSError:
                continue
        with Tree.at(top, view="/workspace") as tree:
            found = Files(tree, None).find(pattern)
            grepped = Files(tree, None).grep("a")
        assert found.complete
        everything = [path for path in top.rglob("*") if path.is_dir() or path.is_file()]
        wanted = {
            f"/workspace/{path.relative_to(top)}"
            for path in everything
            if fnmatch.fnmatchcase(path.name, pattern)
        }
        assert {entry.path for entry in found} == wanted
        lines = {
            f"/workspace/{p.relative_to(top)}"
            for p in everything
            if p.is_file() and "a" in p.read_text()
        }
        assert {match.path for match in grepped} == lines


@given(st.text(), st.text(min_size=1, max_size=3), st.text(max_size=3))
def test_bytes_are_replaced_as_text_would_be(content: str, old: str, new: str) -> None:
    try:
        data = content.encode()
        wanted = content.replace(old, new).encode(), content.count(old)
    except UnicodeEncodeError:
        return
    assert replaced_bytes(data, old, new) == wanted
