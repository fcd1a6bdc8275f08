"""`sbx policy`: list, show and check policies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import output, terminal
from sbx.cli.exits import Exit
from sbx.errors import NotFound, SbxError

if TYPE_CHECKING:
    from sbx.policy import Problem

app = typer.Typer(help="List, show and check policies.", rich_markup_mode=None)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("list")
def list_policies(as_json: _Json = False) -> None:
    """List the policies that you can name: the policies of sbx first, then your own."""
    from sbx.policy import available

    entries = available(_search())
    if as_json:
        policies = [
            {
                "name": entry.name,
                "path": str(entry.path),
                "description": entry.description,
                "extends": entry.extends,
                "aliases": list(entry.aliases),
                "problem": entry.problem,
            }
            for entry in entries
        ]
        output.document({"policies": policies})
        return
    rows = [
        (
            ", ".join((entry.name, *entry.aliases)),
            entry.extends or "",
            f"cannot be used: {entry.problem}" if entry.problem else entry.description,
        )
        for entry in entries
    ]
    output.print_table(("policy", "extends", "its purpose"), rows)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="The name or the file of a policy.", metavar="NAME")],
    as_json: _Json = False,
) -> None:
    """Print the complete policy with every value, as the text of a policy file."""
    from sbx.policy import describe, fingerprint, load, reference
    from sbx.settings_files import to_toml

    policy = load(reference(name), search=_search())
    values = describe(policy)
    if as_json:
        output.document({**values, "fingerprint": fingerprint(policy)})
        return
    del values["name"]  # the name of the file names the policy
    text = f"# {policy.name}, fingerprint {fingerprint(policy)}\n{to_toml(values)}"
    terminal.write(terminal.STDOUT, text)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Policy files.", metavar="FILE…")],
    as_json: _Json = False,
) -> int:
    """Check policy files. List every problem with file, line or key, and the right word."""
    checked = [(file, _problems(file)) for file in files]
    if as_json:
        output.document(
            {
                "files": [
                    {
                        "file": str(file),
                        "ok": not problems,
                        "problems": [problem.to_dict() for problem in problems],
                    }
                    for file, problems in checked
                ]
            }
        )
    else:
        for file, problems in checked:
            _print(file, problems)
            for text in _missing_here(file) if not problems else ():
                output.note(f"{file}: {text}")
    return Exit.USAGE if any(problems for _, problems in checked) else Exit.OK


def _problems(file: Path) -> list["Problem"]:
    from sbx.policy import Problem
    from sbx.policy import check as check_file

    try:
        return check_file(file, search=_search())
    except NotFound as error:
        hint = error.hint or "name a file; sbx policy show NAME shows a policy by its name"
        return [Problem("no such file", file, hint=hint)]
    except SbxError as error:  # the problem is in a directory of policies, not in this file
        return [Problem(error.message, hint=error.hint)]


def _missing_here(file: Path) -> list[str]:
    """Return what this host lacks for a valid policy; another host may have it."""
    from sbx.doctor.host_check import lacking
    from sbx.environments.directory import Environments
    from sbx.policy import load
    from sbx.runtime.settings import Settings

    policy = load(file, search=_search())
    name = policy.environment
    if name is not None:
        try:
            Environments(Settings().environments).interpreter(name, policy.name)
        except SbxError as error:
            return [f"{error.message}; {error.hint}"]
        return []
    if policy.interpreter is not None:
        return []
    return [f"preload: {module} is not installed here" for module in lacking(policy.preload)]


def _print(file: Path, problems: list["Problem"]) -> None:
    lines = [] if problems else [f"{file}: ok"]
    for problem in problems:
        lines.append(str(problem))
        if problem.hint:
            lines.append(f"  hint: {problem.hint}")
    text = "".join(f"{terminal.one_line(line) if line[0] != ' ' else line}\n" for line in lines)
    terminal.write(terminal.STDOUT, text)


def _search() -> tuple[Path, ...]:
    from sbx.runtime.settings import Settings

    return Settings().policy_dirs
