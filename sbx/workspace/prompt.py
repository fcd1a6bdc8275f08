"""What a model is told of a conversation's files."""

from collections.abc import Sequence

from sbx.protocol.files import Upload
from sbx.workspace.paths import UPLOADS, UPLOADS_APART

_GENERATED = "/workspace/uploads/generated/"
_TOLD = 500  # files in one prompt


def uploads_told(found: Sequence[Upload], *, apart: bool = False) -> str:
    """The text for a system prompt; `apart` where a host directory is the workspace.

    Names are the user's: each is a line of its own, and what does not print is escaped, so that
    none of them reads as a sentence of ours.
    """
    root = f"{UPLOADS_APART if apart else UPLOADS}/"
    lines = [f"The files that the user uploaded are in {root}, which is read-only."]
    if found:
        lines.append("These are all of them, with their full paths:")
        lines += [f"- {_plain(upload.path)} ({upload.size} bytes)" for upload in found[:_TOLD]]
        if len(found) > _TOLD:
            lines.append(f"- and {len(found) - _TOLD} more: list {root}")
    else:
        lines.append("There are none yet.")
    if apart:
        lines.append("The working directory is /workspace: a directory of the user's own.")
    else:
        lines.append(f"Write the files that you generate to {_GENERATED}.")
        lines.append("The working directory is /workspace; what is written there is kept as well.")
    return "\n".join(lines)


def _plain(path: str) -> str:
    return path if path.isprintable() else ascii(path)
