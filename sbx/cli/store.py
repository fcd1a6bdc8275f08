"""`sbx store`: the store of a service, and the directories that have no row in it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write
from sbx.errors import BadRequest, Conflict, SbxError

if TYPE_CHECKING:
    from sbx.service.maintenance.backup import ReplacedStore
    from sbx.service.maintenance.check import DirectoryName, StoreCheck
    from sbx.service.maintenance.repair import Repaired

_REMOVE_S = 600.0

app = typer.Typer(
    help="Check, back up, restore or repair the store of a service.", rich_markup_mode=None
)

DataDir = Annotated[
    Path | None,
    typer.Option(envvar="SBX_DATA_DIR", help="The service's data directory.", metavar="DIR"),
]


@app.command()
def check(data_dir: DataDir = None, as_json: connect.Json = False) -> int:
    """Check the store, and whether its rows and the directories on the disk match.

    The service may run. The exit code is 0 if all is well, and 1 for a finding.
    """
    from sbx.service.maintenance.check import check as checked

    result = checked(_data(data_dir))
    if as_json:
        output.document(_check_body(result))
    else:
        _print_check(result)
    return exits.Exit.OK if result.ok else exits.Exit.FAILED


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The file of the copy.", metavar="FILE")],
    force: Annotated[bool, typer.Option(help="Replace FILE if it exists.")] = False,
    data_dir: DataDir = None,
    as_json: connect.Json = False,
) -> int:
    """Copy the store to a file. The service may run, and is not blocked.

    The copy does not contain the files of sandboxes. `sbx store restore` restores the copy.
    """
    from sbx.service.maintenance.backup import backup as backed_up

    done = backed_up(_data(data_dir), file, force=force)
    body = {"file": str(file), "bytes": done.bytes, "mark": done.mark}
    output.outcome(body, f"{one_line(str(file))}: {done.bytes} bytes", as_json=as_json)
    return exits.Exit.OK


@app.command()
def restore(
    file: Annotated[
        Path | None, typer.Argument(help="A backup, or another store.", metavar="[FILE]")
    ] = None,
    empty: Annotated[bool, typer.Option("--empty", help="Start with an empty store.")] = False,
    force: Annotated[
        bool, typer.Option(help="Restore a backup of another data directory.")
    ] = False,
    data_dir: DataDir = None,
    as_json: connect.Json = False,
) -> int:
    """Replace the store with a backup. The old store is kept under another name.

    The service must be stopped. Sandbox directories that are not in the backup are moved to
    `unclaimed` at the next start.
    """
    from sbx.service.maintenance.backup import restore as restored
    from sbx.service.maintenance.check import on_disk

    if (file is None) != empty:
        raise BadRequest("name a backup, or use --empty", code="usage")
    data = _data(data_dir)
    if empty and not as_json:
        output.note(
            f"an empty store has no sandbox and no key: the next start moves {len(on_disk(data))}"
            " directories of sandboxes to unclaimed"
        )
    done = restored(data, file, force=force)
    if as_json:
        output.document(_replaced_body(done))
    else:
        write(STDOUT, f"restored {'an empty store' if file is None else one_line(str(file))}\n")
        _note_replaced(done)
    return exits.Exit.OK


@app.command()
def repair(data_dir: DataDir = None, as_json: connect.Json = False) -> int:
    """Copy the rows of a damaged store to a new one, and add missing workspace rows.

    The service must be stopped. The damaged store is kept under another name.
    """
    from sbx.service.maintenance.repair import repair as repaired

    done = repaired(_data(data_dir))
    if as_json:
        output.document(_repaired_body(done))
    else:
        _print_repaired(done)
    return exits.Exit.OK


@app.command()
def unclaimed(
    remove: Annotated[
        list[str] | None,
        typer.Option(help="Delete this directory permanently. Repeatable.", metavar="ID"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Delete all of them permanently.")] = False,
    data_dir: DataDir = None,
    as_json: connect.Json = False,
) -> int:
    """List the directories of sandboxes that had no row in the store, or remove some.

    They are in DIR/unclaimed. `sbx store restore` and `repair` move a directory back if the new
    store has a row for it.
    """
    from sbx.workspace import unclaimed as directories

    data = _data(data_dir)
    if remove or every:
        if remove and every:
            raise BadRequest("name the directories, or use --all", code="usage")
        ids = [item.id for item in directories.items(data)] if every else remove or []
        return _removed(data, list(dict.fromkeys(ids)), as_json=as_json)
    items = directories.measured(data)
    if as_json:
        output.document({"items": items})
    elif not items:
        output.note("the data directory has no unclaimed directories")
    else:
        rows = [
            (item.id, item.moved_at, *map(_number, (item.uid, item.files, item.bytes)))
            for item in items
        ]
        output.print_table(("id", "moved", "uid", "files", "bytes"), rows)
    return exits.Exit.OK


def _data(data_dir: Path | None) -> Path:
    from sbx.service.maintenance.place import demand

    if data_dir is None:
        from sbx.api.server.settings import read_settings

        data_dir = read_settings().settings.data
    return demand(data_dir)


def _removed(data: Path, ids: list[str], *, as_json: bool) -> int:
    from sbx.workspace import unclaimed as directories

    removed: list[str] = []
    failures: list[tuple[str, SbxError]] = []
    recorded = _record_removal(data, ids)
    for item_id in ids:
        try:
            if not directories.remove(data, item_id, _REMOVE_S):
                raise Conflict(f"{item_id} could not be removed completely", hint="try again")
        except SbxError as error:
            failures.append((item_id, error))
        else:
            removed.append(item_id)
    if as_json:
        errors = [{"id": item_id, **failure.to_dict()} for item_id, failure in failures]
        output.document({"removed": removed, "recorded": recorded, "errors": errors})
    else:
        for item_id in removed:
            write(STDOUT, f"removed {item_id}\n")
        if not ids:
            output.note("the data directory has no unclaimed directories")
        for _, failure in failures:
            output.failure(failure.message, failure.hint)
        if removed and not recorded:
            output.note("the service is running, so the audit log does not record this")
    return exits.for_error(failures[0][1]) if failures else exits.Exit.OK


def _record_removal(data: Path, ids: list[str]) -> bool:
    """Add a line to the audit log for each id. Return False if the service runs: it owns the
    log."""
    from sbx.service.maintenance import place

    try:
        with place.as_owner(data), place.ended(data):
            for item_id in ids:
                place.record(data, "store.unclaimed.remove", item_id)
    except Conflict:
        return False
    return True


def _check_body(result: "StoreCheck") -> dict[str, Any]:
    return {
        "store": str(result.store),
        "running": result.running,
        "ok": result.ok,
        "error": result.error and result.error.to_dict(),
        "problems": result.problems,
        "version": result.version,
        "store_mark": result.store_mark,
        "directory_mark": result.directory_mark,
        "without_directory": result.without_directory,
        "without_row": result.without_row,
        "without_workspace": result.without_workspace,
        "unclaimed": result.unclaimed,
    }


def _print_check(result: "StoreCheck") -> None:
    state = "ok" if result.ok else "not ok"
    generation = f", generation {result.store_mark.generation}" if result.store_mark else ""
    running = "the service is running" if result.running else "the service is stopped"
    write(STDOUT, f"{one_line(str(result.store))}: {state}, {running}{generation}\n")
    if result.error is not None:
        output.failure(result.error.message, result.error.hint)
    for problem in result.problems:
        output.failure(problem)
    for sandbox in result.without_workspace:
        output.failure(f"the sandbox {sandbox} has no workspace row", "sbx store repair adds one")
    for directory in result.without_directory:
        files = f"the files of a conversation of {directory.sandbox}"
        output.failure(f"{files} are missing: {_path(directory)}")
    for directory in result.without_row:
        output.failure(
            f"the directory {_path(directory)} has no row in the store",
            "the next start, or the next collection, moves it to unclaimed",
        )
    if result.unclaimed:
        output.note(f"{result.unclaimed} unclaimed directories are kept: sbx store unclaimed")


def _path(directory: "DirectoryName") -> str:
    names = ("sandboxes", directory.directory, directory.conversation)
    return "/".join(name for name in names if name)


def _replaced_body(done: "ReplacedStore") -> dict[str, Any]:
    return {
        "mark": done.mark,
        "kept": done.kept and str(done.kept),
        "unknown": done.unknown,
        "brought_back": list(done.brought_back),
    }


def _note_replaced(done: "ReplacedStore") -> None:
    if done.kept is not None:
        output.note(f"the old store is kept as {done.kept}")
    if done.brought_back:
        output.note(f"{len(done.brought_back)} unclaimed directories were moved back")
    if done.unknown:
        output.note(
            f"up to {done.unknown} directories have no row in the store: the next start moves"
            " them to unclaimed"
        )


def _repaired_body(done: "Repaired") -> dict[str, Any]:
    return {
        "repaired": done.replaced is not None,
        "tables": done.tables,
        "found_again": list(done.found_again),
        "without_files": list(done.without_files),
        "dropped": done.dropped,
        "replaced": done.replaced and _replaced_body(done.replaced),
    }


def _print_repaired(done: "Repaired") -> None:
    if done.replaced is None:
        output.note("there is nothing to repair")
        return
    if done.tables:
        rows = [
            (name, str(table.saved), "?" if table.lost is None else str(table.lost))
            for name, table in done.tables.items()
        ]
        output.print_table(("table", "saved", "lost"), rows)
    for sandbox in done.found_again:
        output.note(f"the sandbox {sandbox} has a new workspace row for its directory")
    for sandbox in done.without_files:
        output.note(f"the files of the sandbox {sandbox} were not found: it has an empty directory")
    if done.dropped:
        output.note(
            f"{done.dropped} rows were dropped because the rows that they belong to are lost"
        )
    _note_replaced(done.replaced)


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
