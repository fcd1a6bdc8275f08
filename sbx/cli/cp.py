"""`sbx cp`: copy files into a sandbox of a running service, or out of it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDERR, STDOUT, one_line, write
from sbx.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from sbx.cli.host_executables import LeftOut
    from sbx.client import Client
    from sbx.client.conversation import RemoteConversation

_UPLOADS = "uploads/temparea"
_PROGRESS_AFTER_S = 0.3  # a faster copy shows no bar

OnProgress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """One end of a copy: a path on this machine or in a sandbox."""

    path: str
    sandbox_id: str | None = None

    @classmethod
    def read(cls, text: str) -> "CopyTarget":
        """Parse a place. `ID:path` is in a sandbox. A text without a colon, or with a `/` before
        it, is a path on this machine."""
        before, colon, after = text.partition(":")
        if colon and before and "/" not in before:
            return cls(after, before)
        return cls(text)

    def __str__(self) -> str:
        return self.path if self.sandbox_id is None else f"{self.sandbox_id}:{self.path}"


@dataclass(frozen=True, slots=True)
class TransferResult:
    source: str
    target: str
    size: int
    left_out: "tuple[LeftOut, ...]" = ()


def cp(
    places: Annotated[
        list[str],
        typer.Argument(
            help="The sources and the target: PATH or ID:PATH; ID: alone is /workspace.",
            metavar="SOURCE… TARGET",
        ),
    ],
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="Copy directories with all their content.")
    ] = False,
    with_host_executables: Annotated[
        bool,
        typer.Option(
            "--with-host-executables",
            help="With -r out of a sandbox: also copy files that programs of this host obey, such "
            "as .git and .envrc.",
        ),
    ] = False,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Copy files into a sandbox, out of it, or from one sandbox to another.

    If the target is a directory, or ends with /, a file keeps its name. A file copied to
    ID:uploads/temparea/ becomes an upload: code inside can read it, but not change it. With -r,
    directories are copied, too: into an existing directory under their own name, else as the
    target.

    A directory from a sandbox is copied without files that a program of this host would obey: git
    repositories, .envrc, .vscode and so on. Each is listed, and the exit code is 3. Between
    sandboxes everything is copied, and nothing is written to this machine.
    """
    *sources, target = map(CopyTarget.read, places)
    _check(sources, target, recursive=recursive)
    copied: list[TransferResult] = []

    async def copy(client: "Client") -> None:
        for source in sources:
            with _bar(source, shown=not as_json) as on_progress:
                if None not in (source.sandbox_id, target.sandbox_id):
                    done = await _copy_between(
                        client, source, target, conversation, on_progress, recursive=recursive
                    )
                elif recursive and await _is_directory(client, source, conversation):
                    done = await _copy_tree(
                        client,
                        source,
                        target,
                        conversation,
                        with_host_executables=with_host_executables,
                    )
                elif target.sandbox_id is not None:
                    done = await _put(client, source, target, conversation, on_progress)
                else:
                    done = await _get(client, source, target, conversation, on_progress)
            copied.append(done)
            if not as_json:
                write(STDOUT, f"{one_line(done.source)} -> {one_line(done.target)}\n")

    connect.ask(socket, key, copy)
    left_out = [item for c in copied for item in c.left_out]
    if as_json:
        items = [{"source": c.source, "target": c.target, "size": c.size} for c in copied]
        output.document({"copied": items, "left_out": [asdict(item) for item in left_out]})
    elif left_out:
        from sbx.cli.host_executables import report_left_out

        report_left_out(left_out, "look at them first; --with-host-executables copies them too")
    return exits.Exit.REFUSED if left_out else exits.Exit.OK


def _check(sources: list[CopyTarget], target: CopyTarget, *, recursive: bool) -> None:
    """Check the places before anything is copied. Raise BadRequest, NotFound."""
    if not sources:
        raise BadRequest("the target is missing", hint="sbx cp SOURCE… TARGET")
    inside = [source.sandbox_id is not None for source in sources]
    if target.sandbox_id is None and not all(inside):
        raise BadRequest(
            "neither end is in a sandbox", hint="write it as ID:PATH, with the ID from sbx ps"
        )
    for source in sources:
        if source.sandbox_id is None and not (recursive and os.path.isdir(source.path)):
            _check_file(source.path)
    if target.sandbox_id is None and len(sources) > 1 and not os.path.isdir(target.path):
        raise BadRequest(f"{target.path} is not a directory, and there are several sources")


def _check_file(path: str) -> None:
    if os.path.isdir(path):
        raise _only_files(path)
    if not os.path.exists(path):
        raise NotFound(f"file {path} does not exist", code="file_not_found", hint="check the path")
    if not os.path.isfile(path):
        raise BadRequest(f"{path} is not a regular file", hint="copy it to a file first")


def _only_files(path: str) -> BadRequest:
    return BadRequest(
        f"{path} is a directory, and only files are copied", code="is_a_directory", hint="use -r"
    )


async def _is_directory(client: "Client", source: CopyTarget, conversation: str) -> bool:
    if source.sandbox_id is None:
        import aiofiles.os  # a lazy import keeps `sbx --help` fast

        return await aiofiles.os.path.isdir(source.path)
    where = client.sandbox(source.sandbox_id).conversation(conversation)
    return (await where.files.stat(source.path or ".")).kind == "directory"


async def _copy_tree(
    client: "Client",
    source: CopyTarget,
    target: CopyTarget,
    conversation: str,
    *,
    with_host_executables: bool,
) -> TransferResult:
    from sbx.cli.cp_recursive import get_tree, put_tree

    if target.sandbox_id is not None:
        where = client.sandbox(target.sandbox_id).conversation(conversation)
        path = await _target_inside(where, target.path, _own_name(source.path))
        tally = await put_tree(where, Path(source.path), path)
        copied = TransferResult(source.path, f"{target.sandbox_id}:{path}", tally.size)
    else:
        where = client.sandbox(source.sandbox_id or "").conversation(conversation)
        local = _tree_here(target.path, source)
        tally = await get_tree(
            where, source.path or ".", local, with_host_executables=with_host_executables
        )
        left_out = tuple(replace(item, path=_joined(source, item.path)) for item in tally.left_out)
        copied = TransferResult(str(source), str(local), tally.size, left_out)
    _report_skipped(tally.skipped)
    return copied


async def _copy_between(
    client: "Client",
    source: CopyTarget,
    target: CopyTarget,
    conversation: str,
    on_progress: OnProgress,
    *,
    recursive: bool,
) -> TransferResult:
    from sbx.cli.cp_between import copy_file, copy_tree

    from_where, where = (
        client.sandbox(place.sandbox_id or "").conversation(conversation)
        for place in (source, target)
    )
    entry = await from_where.files.stat(source.path or ".")
    if entry.kind == "directory" and not recursive:
        raise _only_files(str(source))
    name = PurePosixPath(entry.path).name
    path = await _target_inside(where, target.path, name)
    shown = f"{target.sandbox_id}:{path}"
    if source.sandbox_id == target.sandbox_id:
        copied = await where.files.copy(source.path or ".", path, overwrite=True)
        return TransferResult(str(source), shown, copied.bytes)
    if entry.kind == "directory":
        size, skipped = await copy_tree(from_where, source.path or ".", where, path, on_progress)
        _report_skipped(skipped)
        return TransferResult(str(source), shown, size)
    upload = _as_upload(path)
    size = await copy_file(from_where, source.path, where, path, upload, on_progress)
    return TransferResult(str(source), shown, size)


def _report_skipped(count: int) -> None:
    if count:
        write(STDERR, f"{count} entries were left out: links, devices and pipes\n")


def _joined(source: CopyTarget, path: str) -> str:
    return os.path.normpath(os.path.join(source.path, path))


def _own_name(path: str) -> str:
    """Return the name of a local directory, also for `.` and `..`."""
    return os.path.basename(os.path.abspath(path)) or "root"


def _tree_here(path: str, source: CopyTarget) -> Path:
    name = os.path.basename(os.path.normpath(source.path or "."))
    name = name if name not in ("", ".", "..") else "workspace"
    return Path(path, name) if os.path.isdir(path) else Path(path)


async def _put(
    client: "Client",
    source: CopyTarget,
    target: CopyTarget,
    conversation: str,
    on_progress: OnProgress,
) -> TransferResult:
    where = client.sandbox(target.sandbox_id or "").conversation(conversation)
    name = Path(source.path).name
    path = await _target_inside(where, target.path, name)
    if (upload := _as_upload(path)) is not None:
        stored = await where.uploads.put(Path(source.path), upload, on_progress=on_progress)
        return TransferResult(source.path, f"{target.sandbox_id}:{stored.path}", stored.size)
    size = await where.files.upload(source.path, path, on_progress=on_progress)
    return TransferResult(source.path, f"{target.sandbox_id}:{path}", size)


async def _target_inside(where: "RemoteConversation", path: str, name: str) -> str:
    """Return the path of the target. As with cp(1), a file in a directory keeps its name."""
    if path in ("", ".", "/workspace", "/workspace/"):
        return name
    if path.endswith("/"):
        return path + name
    if _folded(path) == _UPLOADS:
        return f"{path}/{name}"
    try:
        entry = await where.files.stat(path)
    except NotFound:
        return path
    return f"{path}/{name}" if entry.kind == "directory" else path


async def _get(
    client: "Client",
    source: CopyTarget,
    target: CopyTarget,
    conversation: str,
    on_progress: OnProgress,
) -> TransferResult:
    where = client.sandbox(source.sandbox_id or "").conversation(conversation)
    local = _target_here(target.path, source)
    size = await where.files.download(source.path, local, on_progress=on_progress)
    return TransferResult(str(source), str(local), size)


def _target_here(path: str, source: CopyTarget) -> Path:
    if not (path.endswith("/") or os.path.isdir(path)):
        return Path(path)
    name = os.path.basename(source.path)
    if name in ("", ".", ".."):
        raise BadRequest(f"{source} does not name a file", hint="name a file: ID:out.csv")
    return Path(path, name)


def _as_upload(path: str) -> str | None:
    """Return the name of an upload, or None for any other path."""
    above, slash, name = _folded(path).rpartition("/")
    return name if slash and above == _UPLOADS else None


def _folded(path: str) -> str:
    """Return the normalized path below /workspace. The service makes the real decision."""
    return os.path.normpath(path).removeprefix("/workspace/")


@contextmanager
def _bar(source: CopyTarget, *, shown: bool) -> Iterator[OnProgress]:
    """Show a progress bar on the terminal of stderr for a slow copy, and remove it at the end."""
    if not (shown and os.isatty(STDERR)):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    progress = Progress(
        *columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True
    )
    task = progress.add_task(one_line(str(source)), total=None, markup=False)
    started_at = time.monotonic()

    def on_progress(done: int, total: int | None) -> None:
        if not progress.live.is_started and time.monotonic() - started_at > _PROGRESS_AFTER_S:
            progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield on_progress
    finally:
        progress.stop()
