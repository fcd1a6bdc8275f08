"""Results in the form that a model receives: errors as text, long results shortened, and the full
text in a file."""

import hashlib
import json

from sbx.agent.messages import carried
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools.tool import ToolCallRequest, ToolResult
from sbx.errors import SbxError
from sbx.protocol.approvals import ApprovalDecision
from sbx.telemetry.host_paths import without_host_paths
from sbx.workspace.paths import GENERATED

RESULT_MAX = 32_768  # characters
_WHOLE_MAX = 8 << 20  # characters of the file with the full text


def _refusal(code: str, sentence: str) -> ToolResult:
    error = {"code": code, "message": sentence}
    return ToolResult(f"Error ({code}): {sentence}", is_error=True, error=error)


FORBIDDEN = _refusal("denied", "this call is not allowed here.")
NO_APPROVER = _refusal("denied", "a person must approve this, and none can be asked.")
NO_APPROVER_FOR_CHANGES = _refusal(
    "denied",
    "this call changes files of the project, which a person must approve, and none can be asked."
    " Its changes were dropped. The setting `changes` of the conversation (or `ask_outside`, for"
    " some directories) allows changes without a question.",
)
WORKSPACE_CHANGED = _refusal(
    "workspace_changed",
    "no file was changed. The call was tried on a copy of the workspace, but other changes of the"
    " same files came before its own could be made, or the copy was too old. Look at the files, and"
    " call it again to have it tried again.",
)
# Follows the result of a call that ran at the same time as earlier calls of the same answer.
MISSED_CHANGES = (
    "\n[sbx] This call did not see the changes of files by earlier calls of the same answer: they"
    " were not applied yet."
)
_CHANGES_HINT = (
    " The setting `changes` of the conversation (or `ask_outside`, for some directories) allows"
    " changes without a question."
)
TOO_MANY_CALLS = _refusal("too_many_calls", "this was not done. Make fewer calls at once.")


def failed(error: SbxError) -> ToolResult:
    """Return an SbxError as a result: its code, its message, its hint."""
    shown = without_host_paths(error)
    hint = f"\nHint: {shown['hint']}" if "hint" in shown else ""
    text = carried(f"Error ({shown['code']}): {shown['message']}{hint}")
    report = json.loads(carried(json.dumps(shown, ensure_ascii=False, default=str)))
    return ToolResult(text, is_error=True, error=report)


def denied(decision: ApprovalDecision, more: str = "") -> ToolResult:
    """Return the result of a denied call. `more` describes the effect of the trial on a copy."""
    why = decision.why
    if more:
        hint = _CHANGES_HINT if decision.by == "nobody" else ""
        why = f"{why.removesuffix(' It was not made.')}{more}{hint}"
    error = {"code": "denied", "message": why, "details": {"by": decision.by}}
    return ToolResult(f"Error (denied): {why}", is_error=True, error=error)


def cut(text: str, most: int, notice: str = "") -> str:
    """Return at most about `most` characters: the beginning, the number of removed characters, and
    the end. Lines stay complete if that costs little."""
    if len(text) <= most:
        return text
    head, tail = _head(text, most // 2), _tail(text, most - most // 2)
    removed = len(text) - len(head) - len(tail)
    return f"{head}\n\n[… {removed} characters cut out here{notice} …]\n\n{tail}"


async def capped(call: ToolCallRequest, tool: str, text: str, most: int) -> str:
    """Return the text. If it is too long, shorten it and store the full text in a file that the
    text names."""
    if len(text) <= most:
        return text
    digest = hashlib.sha256(f"{call.id}\n{text}".encode(errors="replace")).hexdigest()[:16]
    full_text = cut(text, _WHOLE_MAX)
    try:
        path = await keep(call.sandbox, f"{tool}-{digest}.txt", full_text.encode())
    except (SbxError, OSError) as error:
        return cut(text, most, f"; they could not be kept in a file: {error!s:.300}")
    return cut(text, most, f"; the whole is in {path}, read it in parts")


async def keep(sandbox: ToolSandbox, name: str, content: bytes) -> str:
    """Store a file that the user did not request, and return its path. `name` comes from sbx, never
    from the text of a model or of code. Raise the errors of writing a file."""
    if (save := getattr(sandbox, "save_result", None)) is not None:
        return str(await save(name, content))
    path = f"{GENERATED}/{name}"
    await sandbox.files.write(path, content)
    return path


def _head(text: str, limit: int) -> str:
    end = text.rfind("\n", limit - limit // 8, limit)
    return text[: end + 1] if end >= 0 else text[:limit]


def _tail(text: str, limit: int) -> str:
    start = len(text) - limit
    line = text.find("\n", start, start + limit // 8)
    return text[line + 1 :] if line >= 0 else text[start:]
