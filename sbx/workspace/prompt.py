"""The text about the files of a conversation for the system prompt of a model."""

from collections.abc import Sequence

from sbx.protocol.files import Upload
from sbx.workspace.paths import UPLOADS, UPLOADS_APART

_GENERATED = "/workspace/uploads/generated/"
_LISTED_MAX = 500  # files in one prompt


def uploads_told(uploads: Sequence[Upload], *, apart: bool = False) -> str:
    """Return the text for a system prompt. `apart`: a host directory is the workspace.

    The user chooses the names. So each name has its own line, and unprintable characters are
    escaped: a name cannot pass for a sentence of the prompt.
    """
    root = f"{UPLOADS_APART if apart else UPLOADS}/"
    lines = [f"The files that the user uploaded are in {root}, which is read-only."]
    if uploads:
        lines.append("These are all of them, with their full paths:")
        lines += [
            f"- {_plain(upload.path)} ({upload.size} bytes)" for upload in uploads[:_LISTED_MAX]
        ]
        if len(uploads) > _LISTED_MAX:
            lines.append(f"- and {len(uploads) - _LISTED_MAX} more: list {root}")
    else:
        lines.append("There are no files yet.")
    if apart:
        lines.append("The working directory is /workspace: a directory that belongs to the user.")
    else:
        lines.append(f"Write the files that you generate to {_GENERATED}.")
        lines.append(
            "The working directory is /workspace; files that you write there are kept as well."
        )
    return "\n".join(lines)


def _plain(path: str) -> str:
    return path if path.isprintable() else ascii(path)
