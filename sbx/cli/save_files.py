"""Save the figures of a run, or the files of an agent, to a directory of the host."""

import base64
import binascii
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbx.cli import output
from sbx.errors import BadRequest, SbxError, Unavailable
from sbx.protocol.bundles import text_of
from sbx.protocol.runs import MimeBundle, Run

if TYPE_CHECKING:
    from sbx.agent.sandbox import ToolSandbox
    from sbx.cli.host_executables import LeftOut
    from sbx.cli.task_results import KeptFiles
    from sbx.protocol.files import FileEntry
    from sbx.runtime.conversation import Conversation

_WORKSPACE = "/workspace"
_UPLOADS = "/workspace/uploads/temparea/"  # the uploads of the caller
_DEPTH_MAX = 100
_SUFFIXES = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}
_FIGURES_MAX = 10_000


@dataclass(slots=True)
class Saved:
    """The files that were saved, and the entries that a program of the host would obey."""

    paths: list[Path] = field(default_factory=list)
    left_out: "list[LeftOut]" = field(default_factory=list)

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


async def save_files(
    sandbox: "ToolSandbox | Conversation | KeptFiles",
    directory: Path,
    leave_out: Collection[str] = (),
) -> Saved:
    """Copy the files below /workspace, except those at the paths of `leave_out`.

    Leave out hidden files, links, and files that a program of the host would obey, such as those of
    a repository without a `.git`. Name unreadable files on stderr. Raise Unavailable `no_space`.
    """
    from sbx.cli.cp_recursive import below, relative_to  # lazy imports keep `sbx run` fast
    from sbx.cli.host_executables import Arrivals

    listing = await sandbox.files.list(_WORKSPACE, max_depth=_DEPTH_MAX)
    if not listing.complete:
        output.note("the workspace has more files than can be listed; some are not saved")
    saved = Saved()
    arrivals = Arrivals([relative_to(_WORKSPACE, entry) for entry in listing], directory)
    for entry in listing:
        if entry.path.startswith(_UPLOADS) or entry.path in leave_out:
            continue
        if not arrivals.permits(relative_to(_WORKSPACE, entry)) or not is_saved(entry):
            continue
        target = below(directory, _WORKSPACE, entry)
        try:
            content = await sandbox.files.read_bytes(entry.path)
        except SbxError as error:
            output.note(f"{entry.path} is not saved: {error.message}")
            continue
        _write(target, content)
        saved.paths.append(target)
    saved.left_out += arrivals.left_out
    return saved


def is_saved(entry: "FileEntry") -> bool:
    """Return whether this is a file, not hidden, and not an upload of the caller."""
    is_hidden = any(part.startswith(".") for part in entry.path.split("/"))
    return entry.kind == "file" and not is_hidden and not entry.path.startswith(_UPLOADS)


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


class Figures:
    """A directory for the figures of a run: figure-1.png, figure-2.png and so on.

    The code in the sandbox controls the content of a figure and, with --workspace, perhaps the
    directory itself. So this class opens the directory once, chooses all names, and never writes to
    an existing file or a link.
    """

    def __init__(self, directory: Path) -> None:
        """Create and open the directory. Raise BadRequest `figures_unusable`."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BadRequest(
                f"figures cannot be written to {directory}: {error.strerror}",
                code="figures_unusable",
                hint="name a directory that you can write to",
            ) from error

    def save(self, run: Run) -> list[Path]:
        """Write the figures and return their paths. Raise Unavailable `no_space`."""
        figures = (_figure(bundle) for bundle in run.outputs)
        return [self._write(*figure) for figure in figures if figure is not None]

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, content: bytes, ending: str) -> Path:
        for number in range(1, _FIGURES_MAX):
            name = f"figure-{number}.{ending}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(name, flags, 0o644, dir_fd=self._fd), "wb") as file:
                    file.write(content)
            except FileExistsError:
                continue
            except OSError as error:
                raise Unavailable(
                    f"a figure cannot be written to {self._directory}: {error.strerror}",
                    code="no_space",
                ) from error
            return self._directory / name
        raise Unavailable(f"{self._directory} already has {_FIGURES_MAX} figures", code="no_space")


def _figure(bundle: MimeBundle) -> tuple[bytes, str] | None:
    for mime, ending in _SUFFIXES.items():
        if (content := text_of(bundle, mime)) is not None:
            if ending == "svg":
                return content.encode(errors="replace"), ending
            try:
                return base64.b64decode(content), ending
            except (binascii.Error, ValueError):
                return None
    return None
