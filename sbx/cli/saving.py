"""Files that an agent wrote, as files of the host."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sbx.cli import report
from sbx.cli.trees import below
from sbx.errors import BadRequest, SbxError, Unavailable

if TYPE_CHECKING:
    from sbx.agent.sandbox import Sandbox
    from sbx.protocol.files import Entry

_WORKSPACE = "/workspace"
_UPLOADS = "/workspace/uploads/temparea/"  # what the caller put in
_DEPTH_MAX = 100


def directory_for(path: Path) -> Path:
    """Made where it is missing. Raises BadRequest `out_unusable`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(
            f"files cannot be put into {path}: {error.strerror}",
            code="out_unusable",
            hint="name a directory that you can write to",
        ) from error
    return path


async def save_files(sandbox: "Sandbox", directory: Path) -> list[Path]:
    """Copy what was written below /workspace; the paths here.

    Hidden files are left out, since what lies in `.git` or `.envrc` may be run by whoever enters
    the directory; links too. What cannot be read is named on stderr. Raises Unavailable `no_space`.
    """
    listing = await sandbox.files.list(_WORKSPACE, max_depth=_DEPTH_MAX)
    if not listing.complete:
        report.note("the workspace has more files than can be listed; some are not saved")
    saved = []
    for entry in filter(_wanted, listing):
        target = below(directory, _WORKSPACE, entry)
        try:
            content = await sandbox.files.read_bytes(entry.path)
        except SbxError as error:
            report.note(f"{entry.path} is not saved: {error.message}")
            continue
        _write(target, content)
        saved.append(target)
    return saved


def _wanted(entry: "Entry") -> bool:
    hidden = any(part.startswith(".") for part in entry.path.split("/"))
    return entry.kind == "file" and not hidden and not entry.path.startswith(_UPLOADS)


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
