"""Tables on stdout: readable without colour, and whole when nobody's screen limits them."""

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sbx.cli.terminal import STDOUT, colours, one_line, write

_WIDTH_OF_A_FILE = 160
_STYLES = {"found": "green", "yes": "green", "missing": "red", "no": "red", "weaker": "yellow"}


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; the words found, missing, yes, no and weaker have colours where there are any."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell), _STYLES.get(cell, "")) for cell in row))
    shown = colours(STDOUT)
    page = io.StringIO()
    console = Console(
        file=page,
        force_terminal=shown,
        color_system="standard" if shown else None,
        width=None if shown else _WIDTH_OF_A_FILE,
    )
    console.print(table)
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    write(STDOUT, "\n".join(lines) + "\n")
