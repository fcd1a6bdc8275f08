"""Save the files of an agent to a directory of the host."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbx.cli import report
from sbx.cli.cp_recursive import below, relative_to
from sbx.cli.host_executables import Arrivals, LeftOut
from sbx.errors import BadRequest, SbxError, Unavailable

if TYPE_CHECKING:
    from sbx.agent.sandbox import ToolSandbox
    from sbx.protocol.files import FileEntry

_WORKSPACE = "/workspace"
_UPLOADS = "/workspace/uploads/temparea/"  # the uploads of the caller
_DEPTH_MAX = 100


@dataclass(slots=True)
class Saved:
    """The files that were saved, and the entries that a program of the host would obey."""

    paths: list[Path] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "saved",
            "paths": [str(path) for path in self.paths],
            "left_out": [asdict(item) for item in self.left_out],
        }


def directory_for(path: Path) -> Path:
    """Create the directory if it is missing, and return it. Raise BadRequest `out_unusable`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(
            f"files cannot be written to {path}: {error.strerror}",
            code="out_unusable",
            hint="name a directory that you can write to",
        ) from error
    return path


async def save_files(sandbox: "ToolSandbox", directory: Path) -> Saved:
    """Copy the files below /workspace.

    Leave out hidden files, links, and files that a program of the host would obey, such as those of
    a repository without a `.git`. Name unreadable files on stderr. Raise Unavailable `no_space`.
    """
    listing = await sandbox.files.list(_WORKSPACE, max_depth=_DEPTH_MAX)
    if not listing.complete:
        report.note("the workspace has more files than can be listed; some are not saved")
    saved = Saved()
    arrivals = Arrivals([relative_to(_WORKSPACE, entry) for entry in listing], directory)
    for entry in listing:
        if _is_upload(entry) or not arrivals.permits(relative_to(_WORKSPACE, entry)):
            continue
        if _is_hidden(entry) or entry.kind != "file":
            continue
        target = below(directory, _WORKSPACE, entry)
        try:
            content = await sandbox.files.read_bytes(entry.path)
        except SbxError as error:
            report.note(f"{entry.path} is not saved: {error.message}")
            continue
        _write(target, content)
        saved.paths.append(target)
    saved.left_out += arrivals.left_out
    return saved


def _is_hidden(entry: "FileEntry") -> bool:
    return any(part.startswith(".") for part in entry.path.split("/"))


def _is_upload(entry: "FileEntry") -> bool:
    return entry.path.startswith(_UPLOADS)


def _write(target: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(target, flags, 0o644), "wb") as file:
            file.write(content)
    except OSError as error:
        raise Unavailable(
            f"{target} cannot be written: {error.strerror}",
            code="no_space",
            hint="free some space, or save to another place",
        ) from error
