"""`sbx kernelspec`: jailed kernels for JupyterLab, VS Code, nbclient, papermill and their like."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import report, terminal
from sbx.cli.exits import Exit
from sbx.errors import BadRequest
from sbx.jupyter import DEFAULT_POLICY

if TYPE_CHECKING:
    from sbx.jupyter.kernelspec import Place

app = typer.Typer(
    help="Install, list and remove jailed kernels for Jupyter.", rich_markup_mode=None
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_User = Annotated[bool, typer.Option("--user", help="In the directory of Jupyter that is yours.")]
_Prefix = Annotated[
    Path | None,
    typer.Option("--prefix", help="Below DIR/share/jupyter/kernels.", metavar="DIR"),
]
_SysPrefix = Annotated[
    bool, typer.Option("--sys-prefix", help="In the environment that sbx itself runs in.")
]


@app.command()
def install(
    policy: Annotated[
        str, typer.Option(help="A policy's name, or its file.", metavar="NAME")
    ] = DEFAULT_POLICY,
    name: Annotated[
        str | None,
        typer.Option(help="What programs call it; else sbx, or sbx-POLICY.", metavar="NAME"),
    ] = None,
    display_name: Annotated[
        str | None, typer.Option(help="What people read.", metavar="TEXT")
    ] = None,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="For a Jupyter of another environment: each kernel is a process of its own, and a "
            "workspace of ours ends with it, also at a restart.",
        ),
    ] = False,
    user: _User = False,
    prefix: _Prefix = None,
    sys_prefix: _SysPrefix = False,
    as_json: _Json = False,
) -> int:
    """Give Jupyter a kernel inside the walls; one of ours of the same name is replaced.

    It lies in your own directory of Jupyter unless an option says otherwise. By the policy
    notebook its code sees the directory that the notebook lies in, and nothing else of the host.
    """
    from sbx.jupyter.kernelspec import Place
    from sbx.jupyter.kernelspec import install as write

    place = _place(user, prefix, sys_prefix) or Place()
    made = write(name, policy, display_name=display_name, place=place, standalone=standalone)
    report.outcome(
        made.to_dict(), f"{made.name}: {made.display_name}, in {made.path}", as_json=as_json
    )
    if not as_json:
        report.note(f"choose it in a notebook, or run: jupyter run --kernel {made.name} SCRIPT.py")
        if not standalone:
            report.note(f"a Jupyter outside of {sys.prefix} needs --standalone to see it")
    return Exit.OK


@app.command("list")
def list_kernelspecs(
    user: _User = False,
    prefix: _Prefix = None,
    sys_prefix: _SysPrefix = False,
    as_json: _Json = False,
) -> None:
    """Every kernel of sbx that Jupyter finds, or that lies in the place that is named."""
    from sbx.cli.tables import print_table
    from sbx.jupyter.kernelspec import installed

    found = installed(_place(user, prefix, sys_prefix))
    if as_json:
        report.document({"kernelspecs": [one.to_dict() for one in found]})
    elif not found:
        report.note("there are none; sbx kernelspec install makes one")
    else:
        rows = [
            (one.name, one.display_name, one.policy, _how(one.standalone), str(one.path))
            for one in found
        ]
        print_table(("kernel", "what people read", "policy", "started", "path"), rows)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The kernel's name.", metavar="NAME")],
    user: _User = False,
    prefix: _Prefix = None,
    sys_prefix: _SysPrefix = False,
    as_json: _Json = False,
) -> int:
    """Remove a kernel of sbx from Jupyter. Notebooks that name it ask for another one."""
    from sbx.jupyter.kernelspec import remove as take_away

    gone = take_away(name, _place(user, prefix, sys_prefix))
    if as_json:
        report.document({"removed": gone.to_dict()})
    else:
        terminal.write(terminal.STDOUT, f"{gone.name}: removed from {gone.path.parent}\n")
    return Exit.OK


def _how(standalone: bool) -> str:
    return "as a process" if standalone else "by Jupyter"


def _place(user: bool, prefix: Path | None, sys_prefix: bool) -> "Place | None":
    """The one that is named; None where none is."""
    from sbx.jupyter.kernelspec import Place

    if user + (prefix is not None) + sys_prefix > 1:
        raise BadRequest(
            "--user, --prefix and --sys-prefix exclude each other", hint="name one place"
        )
    if user:
        return Place()
    if sys_prefix:
        return Place(Path(sys.prefix))
    return Place(prefix) if prefix is not None else None
