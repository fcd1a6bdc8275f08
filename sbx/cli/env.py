"""`sbx env`: Pythons with packages, made once, that policies name as `interpreter = "env:NAME"`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import report, terminal
from sbx.cli.exits import Exit
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable

if TYPE_CHECKING:
    from sbx.runtime.environments.directory import Environments
    from sbx.runtime.environments.hashes import Differences
    from sbx.runtime.environments.record import Environment
    from sbx.runtime.environments.requirements import Wanted

app = typer.Typer(
    help="Make, list, show and remove environments: Pythons with packages, for policies to name.",
    rich_markup_mode=None,
)

_FILE_MAX = 1 << 20
_SHOWN_MAX = 20
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Name = Annotated[str, typer.Argument(help="The environment's name.", metavar="NAME")]


class Installer(StrEnum):
    AUTO = "auto"
    PIP = "pip"
    UV = "uv"


@app.command()
def create(
    name: _Name,
    packages: Annotated[
        list[str] | None,
        typer.Argument(help="What to install, as numpy or 'pandas>=2'.", metavar="[PACKAGE]…"),
    ] = None,
    requirements: Annotated[
        list[Path] | None,
        typer.Option(
            "--requirements", "-r", help="A file of requirements. Repeatable.", metavar="FILE"
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Which Python: 3.12, or the path of one; else that of sbx.", metavar="PYTHON"
        ),
    ] = None,
    installer: Annotated[
        Installer, typer.Option(help="Who installs; auto is uv where it is found.")
    ] = Installer.AUTO,
    build: Annotated[
        bool,
        typer.Option(
            "--build",
            help="Take source distributions too: their code runs here, as you, to be built.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="The longest that all of it may take.", metavar="SECONDS")
    ] = 1800.0,
    as_json: _Json = False,
) -> int:
    """Make an environment, on this host and not in a sandbox.

    The packages are resolved to versions with hashes, exactly these are installed, and every file
    is hashed. They come from where pip or uv are configured to look; what the kernel needs is
    added. A policy names it: interpreter = "env:NAME". If it fails, or is interrupted, nothing is
    left.
    """
    import asyncio

    from sbx.cli.making import made
    from sbx.runtime.environments.making import Asked
    from sbx.runtime.environments.requirements import of_words

    wanted = [*of_words(packages or []), *_of_files(requirements or [])]
    if not timeout > 0:
        raise BadRequest("--timeout must be more than 0 seconds")
    asked = Asked(name, tuple(wanted), python, installer.value, build, timeout)
    found = asyncio.run(made(_environments(), asked, quiet=as_json))
    if as_json:
        report.document(found.to_dict())
        return Exit.OK
    record = found.record
    count = f"{len(record.packages)} packages, {record.files:,} files, {_size(record.bytes)}"
    terminal.write(terminal.STDOUT, f"{name}: Python {record.python}, {count}\n")
    terminal.write(terminal.STDOUT, f'in a policy: interpreter = "env:{name}"\n')
    return Exit.OK


@app.command("list")
def list_environments(as_json: _Json = False) -> None:
    """Every environment that policies can name."""
    from sbx.cli.moments import since
    from sbx.cli.tables import print_table

    found = _environments().all()
    if as_json:
        report.document({"environments": [one.to_dict() for one in found]})
    elif not found:
        report.note("there are no environments; make one with sbx env create NAME PACKAGE…")
    else:
        rows = [
            (
                one.name,
                one.record.python,
                str(len(one.record.packages)),
                _size(one.record.bytes),
                since(one.record.made_at),
                ", ".join(one.record.requirements),
            )
            for one in found
        ]
        print_table(("environment", "python", "packages", "size", "made", "asked for"), rows)


@app.command()
def show(
    name: _Name,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file, and say which was changed.")
    ] = False,
    as_json: _Json = False,
) -> int:
    """What an environment is made of: its Python, its packages with versions, its hashes.

    With --verify, ends with 1 when a file is not what it was when the environment was made.
    """
    environments = _environments()
    found = environments.get(name)
    differences = environments.verify(found) if verify else None
    if as_json:
        told = found.to_dict()
        if differences is not None:
            told["verified"] = {"ok": differences.none, **differences.to_dict()}
        report.document(told)
    else:
        _print(found)
        if differences is not None:
            _print_differences(found, differences)
    return Exit.OK if differences is None or differences.none else Exit.FAILED


@app.command()
def remove(
    name: _Name,
    force: Annotated[
        bool,
        typer.Option("--force", help="Even if a policy names it, or a sandbox is using it now."),
    ] = False,
    as_json: _Json = False,
) -> int:
    """Remove an environment and its files.

    Refused while a policy names it, or a sandbox that this user can see is shown it.
    """
    from sbx.runtime.environments.using import policies_naming, processes_shown

    environments = _environments()
    if not force:
        policies = policies_naming(name, _search())
        try:
            processes = processes_shown(environments.get(name))
        except (NotFound, Unavailable):
            processes = []  # what a killed creation left, perhaps: nobody is shown that
        _refuse_if_used(name, policies, processes)
    environments.remove(name)
    if as_json:
        report.document({"removed": name})
    else:
        terminal.write(terminal.STDOUT, f"{name}: removed\n")
    return Exit.OK


@app.command()
def pythons(as_json: _Json = False) -> None:
    """The Pythons of this host, and which of them an environment can be made of."""
    import asyncio

    from sbx.cli.tables import print_table
    from sbx.runtime.environments.pythons import every

    found = asyncio.run(every(os.environ))
    if as_json:
        report.document(
            {
                "pythons": [
                    {"version": one.text, "path": one.executable, "pip": one.pip or None}
                    | {"ok": one.unfit is None, "cause": one.unfit}
                    for one in found
                ]
            }
        )
        return
    rows = [
        (one.text, "no" if one.unfit else "yes", one.executable, one.unfit or "") for one in found
    ]
    print_table(("python", "fit", "path", "why not"), rows)


def _refuse_if_used(name: str, policies: list[str], processes: list[int]) -> None:
    if policies or processes:
        who = [f"the policy {policies[0]} names it"] if policies else []
        who += [f"process {processes[0]} of a sandbox is shown it"] if processes else []
        raise Conflict(
            f"the environment {name} is in use: {' and '.join(who)}",
            code="environment_in_use",
            hint="end what uses it, or add --force: kernels then fail at what they read from it",
            details={"policies": policies, "processes": processes},
        )


def _of_files(files: list[Path]) -> list["Wanted"]:
    from sbx.runtime.environments.requirements import of_file

    found: list[Wanted] = []
    for file in files:
        try:
            with file.open("rb") as source:
                data = source.read(_FILE_MAX + 1)
        except OSError as error:
            raise NotFound(
                f"{file} cannot be read: {error.strerror}",
                code="file_not_found",
                hint="check the path",
            ) from None
        if len(data) > _FILE_MAX:
            raise BadRequest(f"{file} is larger than 1 MiB", code="invalid_requirement")
        found += of_file(data.decode(errors="replace"), file.name)
    return found


def _print(environment: "Environment") -> None:
    from sbx.cli.tables import print_table

    record = environment.record
    lines = [
        f"{record.name}: Python {record.python}, made {record.made_at} by {record.installer}",
        f"  asked for  {', '.join(record.requirements) or 'nothing but what the kernel needs'}",
        f"  python     {record.executable}, of {record.base}",
        f"  lock       {environment.lock_path}",
        f"  files      {record.files:,}, {_size(record.bytes)}, {record.algorithm} {record.digest}",
    ]
    terminal.write(terminal.STDOUT, "".join(f"{_line(line)}\n" for line in lines) + "\n")
    print_table(("package", "version"), [(one.name, one.version) for one in record.packages])


def _print_differences(environment: "Environment", found: "Differences") -> None:
    if found.none:
        count = f"{environment.record.files:,} files"
        terminal.write(terminal.STDOUT, f"\nverified: {count} are what they were\n")
        return
    kinds = (("changed", found.changed), ("missing", found.missing), ("added", found.added))
    for kind, paths in kinds:
        for path in paths[:_SHOWN_MAX]:
            report.failure(f"{kind}: {path}")
        if len(paths) > _SHOWN_MAX:
            report.failure(f"{kind}: and {len(paths) - _SHOWN_MAX:,} more")


def _line(text: str) -> str:
    indent = len(text) - len(text.lstrip())
    return " " * indent + terminal.one_line(text)


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _environments() -> "Environments":
    from sbx.runtime.environments.directory import Environments
    from sbx.runtime.settings import Settings

    return Environments(Settings().environments)


def _search() -> tuple[Path, ...]:
    from sbx.runtime.settings import Settings

    return Settings().policy_dirs
