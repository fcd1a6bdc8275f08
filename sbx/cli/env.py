"""`sbx env`: environments, which policies name as `interpreter = "env:NAME"`.

An environment is a Python with locked packages. It is created once.
"""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import output, terminal
from sbx.cli.exits import Exit
from sbx.cli.output import size
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable

if TYPE_CHECKING:
    from sbx.environments.directory import Environments
    from sbx.environments.manifest import Differences
    from sbx.environments.record import Environment
    from sbx.environments.requirements import PackageRequirement

app = typer.Typer(
    help="Create, list, show and remove environments: Pythons with packages, for policies.",
    rich_markup_mode=None,
)

_FILE_MAX = 1 << 20
_SHOWN_MAX = 20
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Name = Annotated[str, typer.Argument(help="The environment's name.", metavar="NAME")]


class InstallerChoice(StrEnum):
    AUTO = "auto"
    PIP = "pip"
    UV = "uv"


@app.command()
def create(
    name: _Name,
    packages: Annotated[
        list[str] | None,
        typer.Argument(
            help="A package to install, such as numpy or 'pandas>=2'.", metavar="[PACKAGE]…"
        ),
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
            help="The Python: a version such as 3.12, or a path; default: the Python of sbx.",
            metavar="PYTHON",
        ),
    ] = None,
    installer: Annotated[
        InstallerChoice, typer.Option(help="The installer; auto uses uv if it is installed.")
    ] = InstallerChoice.AUTO,
    build: Annotated[
        bool,
        typer.Option(
            "--build",
            help="Accept source distributions, too. Their build runs code here, as you.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="The time limit for the whole command.", metavar="SECONDS")
    ] = 1800.0,
    as_json: _Json = False,
) -> int:
    """Create an environment, on this host and not in a sandbox.

    The packages are resolved to versions with hashes, exactly these versions are installed, and
    every file is hashed. The packages come from the configured index of pip or uv. The packages
    that the kernel needs are added. A policy names the environment with interpreter = "env:NAME".
    If the command fails or is interrupted, it removes everything again.
    """
    import asyncio

    from sbx.cli.env_progress import create_with_progress
    from sbx.environments.create import EnvironmentSpec
    from sbx.environments.requirements import parse_words

    parsed = [*parse_words(packages or []), *_parse_files(requirements or [])]
    if not timeout > 0:
        raise BadRequest("--timeout must be more than 0 seconds")
    request = EnvironmentSpec(name, tuple(parsed), python, installer.value, build, timeout)
    environment = asyncio.run(create_with_progress(_environments(), request, quiet=as_json))
    if as_json:
        output.document(environment.to_dict())
        return Exit.OK
    record = environment.record
    count = f"{len(record.packages)} packages, {record.files:,} files, {size(record.bytes)}"
    terminal.write(terminal.STDOUT, f"{name}: Python {record.python}, {count}\n")
    terminal.write(terminal.STDOUT, f'in a policy: interpreter = "env:{name}"\n')
    return Exit.OK


@app.command("list")
def list_environments(as_json: _Json = False) -> None:
    """List the environments that policies can name."""
    environments = _environments().all()
    if as_json:
        output.document({"environments": [environment.to_dict() for environment in environments]})
    elif not environments:
        output.note("no environments exist; create one with sbx env create NAME PACKAGE…")
    else:
        rows = [
            (
                environment.name,
                environment.record.python,
                str(len(environment.record.packages)),
                size(environment.record.bytes),
                output.since(environment.record.made_at),
                ", ".join(environment.record.requirements),
            )
            for environment in environments
        ]
        output.print_table(("environment", "python", "packages", "size", "made", "asked for"), rows)


@app.command()
def show(
    name: _Name,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file, and report the changed ones.")
    ] = False,
    as_json: _Json = False,
) -> int:
    """Show an environment: its Python, its packages with versions, and its hashes.

    With --verify, the exit code is 1 if a file has changed since the environment was created.
    """
    environments = _environments()
    environment = environments.get(name)
    differences = environments.verify(environment) if verify else None
    if as_json:
        document = environment.to_dict()
        if differences is not None:
            document["verified"] = {"ok": differences.none, **differences.to_dict()}
        output.document(document)
    else:
        _print(environment)
        if differences is not None:
            _print_differences(environment, differences)
    return Exit.OK if differences is None or differences.none else Exit.FAILED


@app.command()
def remove(
    name: _Name,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Remove it even if a policy names it, or a sandbox uses it now."
        ),
    ] = False,
    as_json: _Json = False,
) -> int:
    """Remove an environment and its files.

    The command refuses if a policy names the environment, or if a sandbox that this user can see
    has it mounted.
    """
    from sbx.environments.directory import policies_naming, processes_shown

    environments = _environments()
    if not force:
        policies = policies_naming(name, _search())
        try:
            processes = processes_shown(environments.get(name))
        except (NotFound, Unavailable):
            processes = []  # perhaps the rest of a killed creation, which no sandbox can use
        _refuse_if_used(name, policies, processes)
    environments.remove(name)
    if as_json:
        output.document({"removed": name})
    else:
        terminal.write(terminal.STDOUT, f"{name}: removed\n")
    return Exit.OK


@app.command()
def pythons(as_json: _Json = False) -> None:
    """List the Pythons of this host, and whether an environment can be based on each."""
    import asyncio

    from sbx.environments.pythons import every

    interpreters = asyncio.run(every(os.environ))
    if as_json:
        output.document(
            {
                "pythons": [
                    {
                        "version": interpreter.text,
                        "path": interpreter.executable,
                        "pip": interpreter.pip or None,
                    }
                    | {"ok": interpreter.unfit is None, "cause": interpreter.unfit}
                    for interpreter in interpreters
                ]
            }
        )
        return
    rows = [
        (
            interpreter.text,
            "no" if interpreter.unfit else "yes",
            interpreter.executable,
            interpreter.unfit or "",
        )
        for interpreter in interpreters
    ]
    output.print_table(("python", "fit", "path", "why not"), rows)


def _refuse_if_used(name: str, policies: list[str], processes: list[int]) -> None:
    if policies or processes:
        users = [f"the policy {policies[0]} names it"] if policies else []
        users += [f"process {processes[0]} of a sandbox has it mounted"] if processes else []
        raise Conflict(
            f"the environment {name} is in use: {' and '.join(users)}",
            code="environment_in_use",
            hint="end its users, or add --force: kernels that read from it then fail",
            details={"policies": policies, "processes": processes},
        )


def _parse_files(files: list[Path]) -> list["PackageRequirement"]:
    from sbx.environments.requirements import parse_file

    requirements: list[PackageRequirement] = []
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
        requirements += parse_file(data.decode(errors="replace"), file.name)
    return requirements


def _print(environment: "Environment") -> None:
    record = environment.record
    lines = [
        f"{record.name}: Python {record.python}, made {record.made_at} by {record.installer}",
        f"  asked for  {', '.join(record.requirements) or 'only the packages of the kernel'}",
        f"  python     {record.executable}, of {record.base}",
        f"  lock       {environment.lock_path}",
        f"  files      {record.files:,}, {size(record.bytes)}, {record.algorithm} {record.digest}",
    ]
    terminal.write(terminal.STDOUT, "".join(f"{_line(line)}\n" for line in lines) + "\n")
    output.print_table(
        ("package", "version"), [(package.name, package.version) for package in record.packages]
    )


def _print_differences(environment: "Environment", differences: "Differences") -> None:
    if differences.none:
        count = f"{environment.record.files:,} files"
        terminal.write(terminal.STDOUT, f"\nverified: {count} are unchanged\n")
        return
    kinds = (
        ("changed", differences.changed),
        ("missing", differences.missing),
        ("added", differences.added),
    )
    for kind, paths in kinds:
        for path in paths[:_SHOWN_MAX]:
            output.failure(f"{kind}: {path}")
        if len(paths) > _SHOWN_MAX:
            output.failure(f"{kind}: and {len(paths) - _SHOWN_MAX:,} more")


def _line(text: str) -> str:
    indent = len(text) - len(text.lstrip())
    return " " * indent + terminal.one_line(text)


def _environments() -> "Environments":
    from sbx.environments.directory import Environments
    from sbx.runtime.settings import Settings

    return Environments(Settings().environments)


def _search() -> tuple[Path, ...]:
    from sbx.runtime.settings import Settings

    return Settings().policy_dirs
