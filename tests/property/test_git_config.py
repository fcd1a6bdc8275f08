"""The reader of git's configuration files reads what git reads."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sbx.workspace.git_settings import parse
from tests.tiers import examples

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
PIECES = [
    *("[core]", "[Core.Sub]", '[a "B c"]', '[a "\\"\\\\x"]', "[include]", "[a", "]", "[ a]"),
    *("hooksPath", "x-1", "Path", "=", " = ", " ", "  ", "\t", "\n", "\n", "\r\n", "\r", "\\\n"),
    *('"', '"a b"', '" ', '\\"', "\\\\", "\\n", "\\t", "\\b", "\\x", "\\", "#", ";", " # c"),
    *("tools", "../x", "$", "é", "1", ".", "-", "~/a", "\v"),
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)
LINES = st.lists(
    st.builds(
        "{}{}{}{}".format,
        st.sampled_from(["", "\t", "[core] ", '[a "b"]\n']),
        st.sampled_from(["hooksPath", "X", "[core]"]),
        st.sampled_from(["=", " = ", "", " \t=\t"]),
        TEXT,
    ),
    max_size=4,
).map("\n".join)


@settings(max_examples=examples(400))
@given(text=st.one_of(TEXT, LINES))
@example("[core]\nx = a\\\n  b\n")
@example("[core] x = a \\\n")
@example('[core]\nx = "a" \\\n "b"\\')
def test_a_file_that_git_accepts_is_read_as_by_git(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "git-config"
    file.write_text(text, newline="")
    listed = subprocess.run(
        ["git", "config", "--file", file, "--list", "-z"], capture_output=True, check=False
    )
    if listed.returncode != 0:
        parse(text)  # it raises nothing
        return
    entries = (entry.partition("\n") for entry in listed.stdout.decode().split("\0")[:-1])
    expected = [(key, value if separator else None) for key, separator, value in entries]
    assert _with_spaces(parse(text)) == _with_spaces(expected)


def _with_spaces(settings: Iterable[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Git before 2.45 reads each blank in a value without quotes as a space."""
    return [(key, value and re.sub(r"[\t\r]", " ", value)) for key, value in settings]
