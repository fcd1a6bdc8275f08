"""`sbx quarantine`: the files of host directories that wait for the user's consent.

Everything in a quarantine comes from a sandbox: paths, records and contents are hostile. This
module escapes them before they reach the terminal.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDERR, STDIN, STDOUT, OutputStream, confirmed, one_line, write
from sbx.errors import BadRequest, Denied, NotFound, SbxError

if TYPE_CHECKING:
    from sbx.workspace.quarantine import QuarantineItem

app = typer.Typer(
    help="List, show, restore or drop the files that a program of the host would obey.",
    rich_markup_mode=None,
)

DataDir = Annotated[
    Path | None,
    typer.Option(envvar="SBX_DATA_DIR", help="The service's data directory.", metavar="DIR"),
]
Ids = Annotated[
    list[str] | None,
    typer.Argument(help="The ids of items, from sbx quarantine list.", metavar="ID..."),
]
All = Annotated[bool, typer.Option("--all", help="Every item, or every item of --directory.")]
Of = Annotated[
    Path | None, typer.Option("--directory", help="With --all: only items of DIR.", metavar="DIR")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def list_items(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Only items of this directory of the host.", metavar="[DIRECTORY]"),
    ] = None,
    data_dir: DataDir = None,
    as_json: connect.Json = False,
) -> int:
    """List the items: the directory and path of each, and the program that would obey it."""
    items = _of_directory(_every(_stores(data_dir)), directory)
    if as_json:
        from sbx.workspace.quarantined_content import item_body

        output.document({"items": [item_body(item) for item in items]})
    elif not items:
        output.note("the quarantine is empty")
    else:
        rows = [
            (item.id, item.directory, item.path, item.kind, item.program, item.why)
            for item in items
        ]
        output.print_table(("id", "directory", "path", "kind", "program", "why"), rows)
    return exits.Exit.OK


@app.command()
def show(
    item_id: Annotated[
        str, typer.Argument(help="The id of an item, from sbx quarantine list.", metavar="ID")
    ],
    path: Annotated[
        str | None, typer.Argument(help="A path in an item that is a directory.", metavar="[PATH]")
    ] = None,
    data_dir: DataDir = None,
    as_json: connect.Json = False,
) -> int:
    """Print an item: the content of a file, or the list of a directory. Do not follow symlinks."""
    from sbx.workspace import quarantined_content

    body = quarantined_content.read(_store_of(_stores(data_dir), item_id), item_id, path or "")
    if as_json:
        output.document(body)
    else:
        _print(body)
    return exits.Exit.OK


@app.command()
def restore(
    ids: Ids = None,
    every: All = False,
    directory: Of = None,
    yes: Yes = False,
    data_dir: DataDir = None,
    as_json: connect.Json = False,
) -> int:
    """Copy items to their places in their directories, where programs of the host obey them.

    The command never replaces an existing file. It drops set-id bits.
    """
    from sbx.workspace import quarantine

    def restored(item: "QuarantineItem") -> str:
        return quarantine.restore(_store_of(stores, item.id), item.id)

    stores = _stores(data_dir)
    items = _chosen(stores, ids, directory, every=every)
    _demand_consent("restore", items, yes=yes)
    return _each(items, "restored", restored, as_json=as_json)


@app.command()
def drop(
    ids: Ids = None,
    every: All = False,
    directory: Of = None,
    yes: Yes = False,
    data_dir: DataDir = None,
    as_json: connect.Json = False,
) -> int:
    """Delete items permanently."""
    from sbx.workspace import quarantine

    def dropped(item: "QuarantineItem") -> str:
        quarantine.drop(_store_of(stores, item.id), item.id)
        return f"{item.directory}/{item.path}"

    stores = _stores(data_dir)
    items = _chosen(stores, ids, directory, every=every)
    _demand_consent("drop", items, yes=yes)
    return _each(items, "dropped", dropped, as_json=as_json)


def _stores(data_dir: Path | None) -> list[Path]:
    """Return the quarantines of this user's programs, of the service, of its project server, and of
    the user's chats.

    The user's chats do not belong to another data directory that the user names.
    """
    from sbx.api.server.settings import ServiceSettings
    from sbx.cli.agent_options import chat_directory
    from sbx.runtime.settings import Settings

    override: dict[str, Any] = {} if data_dir is None else {"data_dir": data_dir}
    service = ServiceSettings(**override)
    of_projects = service.model_copy(update={"data_dir": service.projects_data})
    runtimes = (Settings(**override), service, of_projects)
    stores = [settings.protection.quarantines for settings in runtimes]
    if data_dir is None or str(data_dir) == os.environ.get("SBX_DATA_DIR"):
        with suppress(RuntimeError):  # a user without a home
            stores.append(quarantine_of(chat_directory()))
    return list(dict.fromkeys(stores))


def quarantine_of(data_dir: Path) -> Path:
    """Return the quarantine of a runtime with this data directory."""
    from sbx.runtime.settings import Settings

    return Settings(data_dir=data_dir).protection.quarantines


def _every(stores: Sequence[Path]) -> "list[QuarantineItem]":
    from sbx.workspace import quarantine

    return [item for store in stores for item in quarantine.items(store)]


def _store_of(stores: Sequence[Path], item_id: str) -> Path:
    """Return the store of an item. If no store has it, return the first one, which then raises
    NotFound."""
    from sbx.workspace import quarantine

    for store in stores:
        with suppress(NotFound):
            quarantine.get(store, item_id)
            return store
    return stores[0]


def _of_directory(
    items: "Sequence[QuarantineItem]", directory: Path | None
) -> "list[QuarantineItem]":
    if directory is None:
        return list(items)
    real = os.path.realpath(directory)
    return [item for item in items if item.directory == real]


def _chosen(
    stores: Sequence[Path], ids: Sequence[str] | None, directory: Path | None, *, every: bool
) -> "list[QuarantineItem]":
    """Return the items that the options select. Raise BadRequest, NotFound."""
    from sbx.workspace import quarantine

    if bool(ids) == every or (directory is not None and not every):
        raise BadRequest(
            "name the items, or use --all",
            hint="sbx quarantine list; --directory goes with --all",
        )
    if every:
        return _of_directory(_every(stores), directory)
    return [
        quarantine.get(_store_of(stores, item_id), item_id)[0]
        for item_id in dict.fromkeys(ids or ())
    ]


def _demand_consent(verb: str, items: "Sequence[QuarantineItem]", *, yes: bool) -> None:
    """Ask the user. Raise BadRequest without a terminal, and Denied for a no."""
    if yes or not items:
        return
    if not (os.isatty(STDIN) and os.isatty(STDERR)):
        raise BadRequest(
            f"{verb} needs a confirmation at a terminal",
            code="not_confirmed",
            hint="look at the items first (sbx quarantine show ID), then add --yes",
        )
    for item in items:
        write(STDERR, f"{one_line(f'{item.directory}/{item.path}')} ({one_line(item.why)})\n")
    if not confirmed(f"{verb.capitalize()} {len(items)} item{'s' if len(items) > 1 else ''}?"):
        raise Denied("no item was changed", code="not_confirmed", hint="answer y, or add --yes")


def offer(items: "Sequence[QuarantineItem]", store: Path) -> None:
    """Ask for each item whether to restore it, if there is a terminal.

    This implements `host_executables = "ask"` of a policy, after the sandbox has ended.
    """
    from sbx.workspace import quarantine

    if not (os.isatty(STDIN) and os.isatty(STDERR)):
        return
    for item in items:
        place = one_line(f"{item.directory}/{item.path}")
        if confirmed(f"Restore {place} ({one_line(item.why)})?"):
            try:
                quarantine.restore(store, item.id)
            except SbxError as error:
                output.failure(error.message, error.hint)
            else:
                output.note(f"restored {place}")


def _each(
    items: "Sequence[QuarantineItem]",
    done: str,
    action: "Callable[[QuarantineItem], str]",
    *,
    as_json: bool,
) -> int:
    """Apply an action to each item, and report each failure. Raise the failure of a single item."""
    paths: list[str] = []
    failures: list[tuple[QuarantineItem, SbxError]] = []
    for item in items:
        try:
            paths.append(action(item))
        except SbxError as error:
            if len(items) == 1:
                raise
            failures.append((item, error))
        else:
            if not as_json:
                write(STDOUT, f"{done} {one_line(paths[-1])}\n")
    if as_json:
        errors = [{"id": item.id, **failure.to_dict()} for item, failure in failures]
        output.document({done: paths, "errors": errors})
    else:
        for item, failure in failures:
            output.failure(f"{item.id}: {failure.message}", failure.hint)
    return exits.for_error(failures[0][1]) if failures else exits.Exit.OK


def _print(body: dict[str, Any]) -> None:
    from sbx.workspace.snapshots.diff import plain

    for name in ("id", "directory", "path", "kind", "why"):
        write(STDOUT, f"{name + ':':<11}{one_line(str(body[name]))}\n")
    if "target" in body:
        write(STDOUT, f"target:    {one_line(body['target'])}\n")
    if "content" in body:
        mode = "  (executable)" if body["executable"] else ""
        write(STDOUT, f"size:      {body['size']} bytes{mode}\n\n")
        page = OutputStream(STDOUT)
        # A character that moves the cursor, or that is invisible, could hide text from the user.
        page.write("\n".join(map(plain, body["content"].expandtabs(4).split("\n"))))
        page.fresh_line()
        page.end()
    for entry in body.get("entries", ()):
        rest = entry["kind"] if entry["size"] is None else f"{entry['size']} bytes"
        link = f" -> {one_line(entry['target'])}" if "target" in entry else ""
        write(STDOUT, f"  {one_line(entry['path'])}{link}  {rest}\n")
    if not body.get("complete", True):
        output.note("the output is incomplete: the item has more entries or bytes")
