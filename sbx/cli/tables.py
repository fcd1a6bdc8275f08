"""Print tables on stdout: readable without colour, and with a fixed width outside a terminal."""

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
    """Print a table. On a terminal, the words found, missing, yes, no and weaker are coloured."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell), _STYLES.get(cell, "")) for cell in row))
    coloured = colours(STDOUT)
    page = io.StringIO()
    console = Console(
        file=page,
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        width=None if coloured else _WIDTH_OF_A_FILE,
    )
    console.print(table)
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    write(STDOUT, "\n".join(lines) + "\n")
