"""`sbx kernelspec`: jailed kernels for JupyterLab, VS Code, nbclient, papermill and similar."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import output, terminal
from sbx.cli.exits import Exit
from sbx.errors import BadRequest
from sbx.jupyter import DEFAULT_POLICY

if TYPE_CHECKING:
    from sbx.jupyter.kernelspec import KernelspecDir

app = typer.Typer(
    help="Install, list and remove jailed kernels for Jupyter.", rich_markup_mode=None
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_User = Annotated[bool, typer.Option("--user", help="Your own Jupyter directory.")]
_Prefix = Annotated[
    Path | None,
    typer.Option("--prefix", help="The directory DIR/share/jupyter/kernels.", metavar="DIR"),
]
_SysPrefix = Annotated[
    bool, typer.Option("--sys-prefix", help="The environment that sbx itself runs in.")
]


@app.command()
def install(
    policy: Annotated[
        str, typer.Option(help="The name or the file of a policy.", metavar="NAME")
    ] = DEFAULT_POLICY,
    name: Annotated[
        str | None,
        typer.Option(help="The name for programs; default: sbx, or sbx-POLICY.", metavar="NAME"),
    ] = None,
    display_name: Annotated[
        str | None, typer.Option(help="The name for people.", metavar="TEXT")
    ] = None,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="For a Jupyter in another environment: each kernel is a separate process, and its "
            "temporary workspace is deleted with it, also at a restart.",
        ),
    ] = False,
    user: _User = False,
    prefix: _Prefix = None,
    sys_prefix: _SysPrefix = False,
    as_json: _Json = False,
) -> int:
    """Install a jailed kernel for Jupyter. It replaces a kernel of sbx with the same name.

    Without an option, it is installed in your own Jupyter directory. With the policy notebook, its
    code sees the directory of the notebook, and no other files of the host.
    """
    from sbx.jupyter.kernelspec import KernelspecDir
    from sbx.jupyter.kernelspec import install as write

    place = _place(user, prefix, sys_prefix) or KernelspecDir()
    spec = write(name, policy, display_name=display_name, place=place, standalone=standalone)
    output.outcome(
        spec.to_dict(), f"{spec.name}: {spec.display_name}, in {spec.path}", as_json=as_json
    )
    if not as_json:
        output.note(f"choose it in a notebook, or run: jupyter run --kernel {spec.name} SCRIPT.py")
        if not standalone:
            output.note(f"a Jupyter outside {sys.prefix} needs --standalone to see it")
    return Exit.OK


@app.command("list")
def list_kernelspecs(
    user: _User = False,
    prefix: _Prefix = None,
    sys_prefix: _SysPrefix = False,
    as_json: _Json = False,
) -> None:
    """List the kernels of sbx that Jupyter finds, or those in the given place."""
    from sbx.jupyter.kernelspec import installed

    specs = installed(_place(user, prefix, sys_prefix))
    if as_json:
        output.document({"kernelspecs": [spec.to_dict() for spec in specs]})
    elif not specs:
        output.note("Jupyter has no kernels of sbx; sbx kernelspec install creates one")
    else:
        rows = [
            (spec.name, spec.display_name, spec.policy, _how(spec.standalone), str(spec.path))
            for spec in specs
        ]
        output.print_table(("kernel", "display name", "policy", "started", "path"), rows)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The kernel's name.", metavar="NAME")],
    user: _User = False,
    prefix: _Prefix = None,
    sys_prefix: _SysPrefix = False,
    as_json: _Json = False,
) -> int:
    """Remove a kernel of sbx from Jupyter. Notebooks that use it then ask for another kernel."""
    from sbx.jupyter.kernelspec import remove as take_away

    spec = take_away(name, _place(user, prefix, sys_prefix))
    if as_json:
        output.document({"removed": spec.to_dict()})
    else:
        terminal.write(terminal.STDOUT, f"{spec.name}: removed from {spec.path.parent}\n")
    return Exit.OK


def _how(standalone: bool) -> str:
    return "as a process" if standalone else "by Jupyter"


def _place(user: bool, prefix: Path | None, sys_prefix: bool) -> "KernelspecDir | None":
    """Return the place that the options name, or None."""
    from sbx.jupyter.kernelspec import KernelspecDir

    if user + (prefix is not None) + sys_prefix > 1:
        raise BadRequest(
            "--user, --prefix and --sys-prefix exclude each other", hint="name one place"
        )
    if user:
        return KernelspecDir()
    if sys_prefix:
        return KernelspecDir(Path(sys.prefix))
    return KernelspecDir(prefix) if prefix is not None else None
