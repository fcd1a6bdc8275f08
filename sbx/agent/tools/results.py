"""Results as a model gets them: errors in words, nothing longer than is good for it, and what is
left out kept in a file."""

import hashlib

from sbx.agent.messages import carried
from sbx.agent.sandbox import Sandbox, SavesResults
from sbx.agent.tools.tool import Call, ToolResult
from sbx.errors import SbxError
from sbx.telemetry.host_paths import without_host_paths

RESULT_MAX = 32_768  # characters
GENERATED = "/workspace/uploads/generated"
_WHOLE_MAX = 8 << 20  # characters of the file that keeps what was cut


def failed(error: SbxError) -> ToolResult:
    """An error of ours as a result: its code, its sentence, what to do."""
    shown = without_host_paths(error)
    hint = f"\nHint: {shown['hint']}" if "hint" in shown else ""
    return ToolResult(carried(f"Error ({shown['code']}): {shown['message']}{hint}"), is_error=True)


def cut(text: str, most: int, notice: str = "") -> str:
    """At most about `most` characters: the beginning and the end, and between them how many were
    cut. Lines stay whole where that costs little."""
    if len(text) <= most:
        return text
    head, tail = _head(text, most // 2), _tail(text, most - most // 2)
    gone = len(text) - len(head) - len(tail)
    return f"{head}\n\n[… {gone} characters cut out here{notice} …]\n\n{tail}"


async def capped(call: Call, tool: str, text: str, most: int) -> str:
    """The text, cut where it is too long, the whole then in a file that is named."""
    if len(text) <= most:
        return text
    digest = hashlib.sha256(f"{call.id}\n{text}".encode(errors="replace")).hexdigest()[:16]
    whole = cut(text, _WHOLE_MAX)
    try:
        path = await keep(call.sandbox, f"{tool}-{digest}.txt", whole.encode())
    except (SbxError, OSError) as error:
        return cut(text, most, f"; they could not be kept in a file: {error!s:.300}")
    return cut(text, most, f"; the whole is in {path}, read it in parts")


async def keep(sandbox: Sandbox, name: str, content: bytes) -> str:
    """Keep a file that nobody asked for; its path. `name` is made by us, never from text of a
    model's or of code's. Raises as writing a file."""
    if isinstance(sandbox, SavesResults):
        return await sandbox.save_result(name, content)
    path = f"{GENERATED}/{name}"
    await sandbox.files.write(path, content)
    return path


def _head(text: str, most: int) -> str:
    end = text.rfind("\n", most - most // 8, most)
    return text[: end + 1] if end >= 0 else text[:most]


def _tail(text: str, most: int) -> str:
    start = len(text) - most
    line = text.find("\n", start, start + most // 8)
    return text[line + 1 :] if line >= 0 else text[start:]
