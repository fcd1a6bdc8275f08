"""Patterns: what a glob means, and that no pattern and no text takes for ever."""

import time

import pytest

from sbx.errors import BadRequest
from sbx.workspace.edit import replaced_bytes
from sbx.workspace.patterns import PATTERN_MAX, Expression, Glob

GLOBS = (
    ("*.py", "a.py", True),
    ("*.py", "deep/down/a.py", True),
    ("*.py", "a.pyc", False),
    ("a?c", "abc", True),
    ("a?c", "aéc", True),
    ("a?c", "ac", False),
    ("src/*.py", "src/a.py", True),
    ("src/*.py", "src/sub/a.py", False),
    ("src/*.py", "other/src/a.py", False),
    ("src/**/*.py", "src/a.py", True),
    ("src/**/*.py", "src/x/y/a.py", True),
    ("**/a", "a", True),
    ("**/a", "x/y/a", True),
    ("src/**", "src/x/y", True),
    ("src/**", "src", False),
    ("[a-c]1", "b1", True),
    ("[!a-c]1", "b1", False),
    ("[!a-c]1", "d1", True),
    ("[]]", "]", True),
    ("[^]", "^", True),
    ("[a", "[a", True),
    ("a.b+(c)|d", "a.b+(c)|d", True),
    ("a.b", "axb", False),
    ("./a/*", "a/b", True),
    ("\\d", "\\d", True),
    ("\\d", "1", False),
    ("A", "a", False),
)


@pytest.mark.parametrize(("pattern", "path", "matches"), GLOBS)
def test_a_glob_matches_whole_names_or_whole_paths(pattern: str, path: str, matches: bool) -> None:
    assert Glob(pattern).matches(path) is matches


@pytest.mark.parametrize("pattern", ["", "a" * (PATTERN_MAX + 1), "a\nb", "a\0", "\ud800"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    for make in (Glob, lambda text: Expression(text, regex=True, ignore_case=False)):
        with pytest.raises(BadRequest) as refused:
            make(pattern)
        assert refused.value.code == "invalid_pattern"


@pytest.mark.parametrize("pattern", ["(", "[", "a{1001}", r"(a)\1", "(?=a)", "((a{500}){500}){9}"])
def test_what_needs_more_than_linear_time_is_refused(pattern: str) -> None:
    with pytest.raises(BadRequest):
        Expression(pattern, regex=True, ignore_case=False)


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(a|aa)+$", r"(.*)*(.*)*x$", r"^(([a-z])+.)+[A-Z]([a-z])+$", "a{900}b"]
)
def test_a_long_line_takes_its_length_and_no_more(pattern: str) -> None:
    expression = Expression(pattern, regex=True, ignore_case=False)
    began = time.thread_time()  # a busy machine makes no difference, backtracking would
    assert expression.position(b"a" * 60_000 + b"!") is None
    assert time.thread_time() - began < 3


def test_a_block_that_may_not_match_has_no_line_that_does() -> None:
    lines = [b"one", b"two three", b"", b"end\r", b"\xff\xfe"]
    block = b"\n".join(lines)
    for pattern in ("^two", "e$", "^$", r"\Aend", r"three\z", "(?-m)^t", "x", "one|x", r"[^a]\r"):
        expression = Expression(pattern, regex=True, ignore_case=False)
        found = any(expression.position(line) is not None for line in lines)
        assert not found or expression.may_match(block)


def test_plain_text_is_plain() -> None:
    expression = Expression("a.b*", regex=False, ignore_case=True)
    assert expression.position(b"xxA.B*") == 2
    assert expression.position(b"aXb") is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_replacement_keeps_the_encoding(encoding: str) -> None:
    content = "é one\r\n\U0001f600 one".encode(encoding)
    replaced, count = replaced_bytes(content, "one", "öne")
    assert replaced is not None
    assert (replaced.decode(encoding), count) == ("é öne\r\n\U0001f600 öne", 2)


def test_what_is_not_utf8_beside_it_stays() -> None:
    assert replaced_bytes(b"\xff one \xe9", "one", "two") == (b"\xff two \xe9", 1)
    with pytest.raises(BadRequest):
        replaced_bytes(b"\xff\xfea", "a", "b")  # half a character of UTF-16
