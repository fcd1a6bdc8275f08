"""The steps of IPython that a cell may skip are skipped only where they change nothing."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from guest_client import KernelClient

STARTS = (
    *("", " ", "\t", "x", "x.y", "1", "'a'", "(", "[", "{", "-", "@", "#", "\\", "é", "_"),
    *("%", "%%", "!", "!!", "?", "??", ",", ";", "/", ">>> ", ">>>", "... ", "...", "...:"),
    *("In [1]: ", "In [", "In", "Out[1]: ", "ls", "cd", "who", "time", "exit", "quit", "tool"),
    *("print", "for x in y:", "x = ", "def f():", "await x", "timeit", "alias_magic", "bash"),
)
ENDS = (
    *("", " ", " x", "x", "(1)", " = 1", "+1", "?", "??", " ? ", "!", " -l", ".x", "*2", " %x"),
    *("\n", "\n\n", "\r", "\r\n", "\x0c", "\u2028", "\\", " \\", "  # c", " ;", ";", ":", "\ny"),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelClient]:
    with KernelClient(tmp_path_factory.mktemp("kernel")) as client:
        client.run("from IPython.core.macro import Macro; tool = Macro('1+1')")
        yield client


COMPARE = """
from IPython.core.interactiveshell import InteractiveShell
ip = get_ipython()
def differ(cells):
    def both(cell):
        return ip.transform_cell(cell), InteractiveShell.transform_cell(ip, cell)
    return [(cell, *both(cell)) for cell in cells if len(set(both(cell))) > 1]
"""


def test_no_cell_is_taken_for_python_that_ipython_would_change(kernel: KernelClient) -> None:
    cells = [start + end for start, end in product(STARTS, ENDS)]
    kernel.run(COMPARE)
    assert kernel.run(f"differ({cells!r})").result == "[]"
    assert kernel.run("ip._is_python('1+1'), ip._is_python('who')").result == "(True, False)"


@pytest.mark.full_tier
@pytest.mark.parametrize(
    "change",
    [
        "ip.input_transformers_cleanup.append(other_x)",
        "ip.input_transformer_manager.line_transforms.append(other_x)",
        "ip.input_transformers_post.append(other_x)",
        "%autocall 2",
        "%alias x ls",
        "ip.register_magic_function(lambda line: 1, magic_name='x')",
    ],
)
def test_whoever_adds_to_ipythons_syntax_is_asked(change: str, tmp_path: Path) -> None:
    with KernelClient(tmp_path) as kernel:
        kernel.run(COMPARE)
        kernel.run("y = int\ndef other_x(lines): return ['z\\n'] if lines == ['x\\n'] else lines")
        assert kernel.run(change).reply["status"] == "ok"
        assert kernel.run("%precision\ndiffer(['x', 'y 3', '1+1', 'x -l'])").result == "[]"


def test_plain_values_are_shown_as_ipython_shows_them(kernel: KernelClient) -> None:
    kernel.run("from IPython.core.formatters import DisplayFormatter")
    values = "[0, -5, 10**4000, True, 'a\\'b\"\\n\\u2028\\udc80', '', 'x' * 500, 1.5, b'z', None]"
    same = (
        f"[get_ipython().display_formatter.format(v)"
        f" == DisplayFormatter.format(get_ipython().display_formatter, v) for v in {values}]"
    )
    assert kernel.run(f"all({same})").result == "True"


def test_a_number_of_too_many_digits_is_an_error_as_ever(kernel: KernelClient) -> None:
    cell = kernel.run("10 ** 5000")
    assert cell.reply["status"] == "error"
    assert cell.reply["ename"] == "ValueError"


def test_whoever_formats_plain_values_is_asked(tmp_path: Path) -> None:
    with KernelClient(tmp_path) as kernel:
        kernel.run(
            "plain = get_ipython().display_formatter.formatters['text/plain']\n"
            "plain.for_type(int, lambda value, p, cycle: p.text(f'<{value}>'));"
        )
        assert kernel.run("7").result == "<7>"
