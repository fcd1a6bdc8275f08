"""Write the figures of a run to files on the host."""

import base64
import binascii
import os
from pathlib import Path

from sbx.errors import BadRequest, Unavailable
from sbx.protocol.bundles import text_of
from sbx.protocol.runs import MimeBundle, Run

_ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}
_MOST_NAMES = 10_000


class Figures:
    """A directory for the figures of a run: figure-1.png, figure-2.png …

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
        for number in range(1, _MOST_NAMES):
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
        raise Unavailable(f"{self._directory} already has {_MOST_NAMES} figures", code="no_space")


def _figure(bundle: MimeBundle) -> tuple[bytes, str] | None:
    for mime, ending in _ENDINGS.items():
        if (content := text_of(bundle, mime)) is not None:
            if ending == "svg":
                return content.encode(errors="replace"), ending
            try:
                return base64.b64decode(content), ending
            except (binascii.Error, ValueError):
                return None
    return None
