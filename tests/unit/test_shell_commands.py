"""The commands of a shell script, by whole values."""

import pytest

from sbx.workspace.shell_commands import SCRIPT_DIRECTORY, read_script


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ('#!/bin/sh\nexec ./tools/check.sh "$@" # ./no\n', [("exec", "./tools/check.sh", "$@")]),
        ("a;b&&c||d|e&\nf", [("a",), ("b",), ("c",), ("d",), ("e",), ("f",)]),
        ("if test -x ./a; then ! ./a; fi", [("test", "-x", "./a"), ("./a",)]),
        ("a 'b c'\\ d\"e $f\"", [("a", "b c de $f")]),
        ("a \\\n  b > out 2>&1 < in", [("a", "b", "in")]),
        ("$PWD/a; ${PWD}/b; $(pwd)/c", [("./a",), ("./b",), ("./c",)]),
        ('R=$(git rev-parse --show-toplevel)\n"$R"/a "${R}/b"', [("./a", "./b")]),
        ('D="$(cd "$(dirname "$0")" && pwd)"; $D/x', [(f"{SCRIPT_DIRECTORY}/x",)]),
        ("for f in a/b c; do sh $f; done", [("sh", "a/b"), ("sh", "c")]),
        ("${X:-./a} $Y/b", [("./a", "$Y/b")]),
        ('x="$(./a b)"', [("./a", "b")]),
        ("x=$(./a b)", [("./a", "b")]),
        ("x=`./a b`", [("./a", "b")]),
        ("A=1 B=2 ./a", [("./a",)]),
        ("f() { ./a; }", [("f",), ("./a",)]),
        ("case $x in a) ./b;; esac", [("case", "$x", "in", "a"), ("./b",)]),
        ("eval './a b'", [("eval", "./a b"), ("./a", "b")]),
        ("bash -ec './a; b'", [("bash", "-ec", "./a; b"), ("./a",), ("b",)]),
        ("cat <(./a)", [("cat",), ("./a",)]),
        ('a "never closed', [("a",), ("never", "closed")]),
        ("", []),
    ],
)
def test_read_script_returns_simple_commands(text: str, commands: list[tuple[str, ...]]) -> None:
    assert read_script(text).commands == commands


def test_read_script_returns_assignments_with_their_values() -> None:
    text = 'TOOLS=$PWD/tools\nexport PATH="$TOOLS:$PATH" X=1\n'
    assert read_script(text).assignments == [
        ("TOOLS", "./tools"),
        ("PATH", "./tools:$PATH"),
        ("X", "1"),
    ]


def test_read_script_ends_for_variables_that_double() -> None:
    text = "a=b\n" + "a=$a-$a\n" * 200 + "$a" * 50_000
    read = read_script(text)
    assert max(len(value) for _, value in read.assignments) <= 4096
