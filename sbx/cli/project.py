"""`sbx project`: the projects of a running service, directories of its host that agents work in."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from sbx.client import Client
    from sbx.client.records import ProjectInfo

_PAGE = 200

app = typer.Typer(
    help="Create, list, show, edit and remove projects: directories that agents work in.",
    rich_markup_mode=None,
)
Name = Annotated[
    str | None, typer.Option("--name", help="A name; default: that of DIR.", metavar="TEXT")
]
ProjectId = Annotated[str, typer.Argument(help="The id, from sbx project list.", metavar="ID")]
ProjectIds = Annotated[
    list[str], typer.Argument(help="The ids, from sbx project list.", metavar="ID…")
]


@app.command("create")
def create_project(
    directory: Annotated[
        Path, typer.Argument(help="A directory on the host of the service.", metavar="DIR")
    ],
    name: Name = None,
    no_sandbox: Annotated[
        bool,
        typer.Option(
            "--no-sandbox",
            help="Let tools act on that host itself. Only if its operator set allow_host_mode.",
        ),
    ] = False,
    ask_commands: Annotated[
        bool,
        typer.Option("--ask-commands", help="Ask before each command, not about its changes."),
    ] = False,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Create a project, and print its id.

    DIR must be below one of the setting project_dirs of the service.
    """
    path = str(directory.absolute())
    title = name or directory.absolute().name or path

    async def create(client: "Client") -> "ProjectInfo":
        return await client.create_project(
            title, path, sandbox_enabled=not no_sandbox, ask_commands=ask_commands
        )

    project = connect.ask(socket, key, create)
    output.outcome(asdict(project), one_line(project.id), as_json=as_json)
    return exits.Exit.OK


@app.command("list")
def list_projects(
    as_json: connect.Json = False, socket: connect.Address = None, key: connect.Key = None
) -> int:
    """List your projects."""

    async def every(client: "Client") -> "list[ProjectInfo]":
        page = await client.projects(limit=_PAGE)
        projects = list(page.items)
        while page.next_cursor:
            page = await client.projects(limit=_PAGE, cursor=page.next_cursor)
            projects += page.items
        return projects

    projects = connect.ask(socket, key, every)
    if as_json:
        output.document({"projects": [asdict(project) for project in projects]})
    else:
        rows = [
            (
                project.id,
                project.name,
                "yes" if project.sandbox_enabled else "no",
                output.since(project.created_at),
                project.working_directory,
            )
            for project in projects
        ]
        heads = ("project", "name", "sandbox", "made", "directory")
        empty = "no projects exist; create one with sbx project create"
        output.print_table(heads, rows, empty=empty)
    return exits.Exit.OK


@app.command("show")
def show_project(
    project_id: ProjectId,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Show a project."""
    project = connect.ask(socket, key, lambda client: client.project(connect.not_empty(project_id)))
    _show(project, as_json=as_json)
    return exits.Exit.OK


@app.command("edit")
def edit_project(
    project_id: ProjectId,
    name: Annotated[
        str | None, typer.Option("--name", help="Another name.", metavar="TEXT")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Another directory.", metavar="DIR")
    ] = None,
    sandbox: Annotated[
        bool | None,
        typer.Option("--sandbox/--no-sandbox", help="Turn its sandbox on or off."),
    ] = None,
    ask_commands: Annotated[
        bool | None,
        typer.Option(
            "--ask-commands/--no-ask-commands",
            help="Ask before each command, or about the changes that it makes.",
        ),
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Change a project. Sessions that are open keep its old settings."""
    if all(change is None for change in (name, directory, sandbox, ask_commands)):
        raise BadRequest(
            "nothing would change",
            hint="use --name, --directory, --sandbox, --ask-commands, or the last two with --no-",
        )
    path = None if directory is None else str(directory.absolute())

    async def change(client: "Client") -> "ProjectInfo":
        return await client.change_project(
            connect.not_empty(project_id),
            name=name,
            working_directory=path,
            sandbox_enabled=sandbox,
            ask_commands=ask_commands,
        )

    _show(connect.ask(socket, key, change), as_json=as_json)
    return exits.Exit.OK


@app.command("rm")
def remove_projects(
    project_ids: ProjectIds,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Delete projects with their conversations. Their directories stay as they are."""

    async def remove(client: "Client", project_id: str) -> None:
        await client.delete_project(connect.not_empty(project_id))

    return connect.for_each("removed", project_ids, remove, as_json, socket, key)


def _show(project: "ProjectInfo", *, as_json: bool) -> None:
    if as_json:
        output.document(asdict(project))
        return
    lines = (
        ("project", project.id),
        ("name", project.name),
        ("directory", project.working_directory),
        ("sandbox", "yes" if project.sandbox_enabled else "no"),
        ("asks", "before each command" if project.ask_commands else "about changes of files"),
        ("made", output.since(project.created_at)),
    )
    write(STDOUT, "".join(f"{label:<11}{one_line(text)}\n" for label, text in lines))
