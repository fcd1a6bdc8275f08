"""Turn a frame into Jupyter messages; pure.

Frames are typed when they arrive (`sbx.kernels.frames`). Here the parts of any shape become Python
values. A part that is nested too deep, too large, or not an object raises Malformed, and its kernel
is cut off.

Reference: Jupyter's messaging specification, version 5.4.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from sbx import __version__
from sbx.errors import SbxError
from sbx.kernels import frames
from sbx.protocol.runs import RunError
from sbx.runtime.run.execution import Published
from sbx.runtime.run.frontend import CellEnd

PROTOCOL = "5.4"
# Without `edit_magic`: it names a path of the sandbox, and some clients open that file on the host.
_PAYLOADS = ("set_next_input", "page", "ask_exit")
_VERSION = re.compile(r"\d{1,3}(\.\d{1,5}){1,3}[\w.+-]{0,32}", re.ASCII)
_HELP = (
    ("Python Reference", "https://docs.python.org/{}"),
    ("IPython Reference", "https://ipython.org/documentation.html"),
    ("NumPy Reference", "https://docs.scipy.org/doc/numpy/reference/"),
    ("Matplotlib Reference", "https://matplotlib.org/contents.html"),
    ("pandas Reference", "https://pandas.pydata.org/pandas-docs/stable/"),
)


class JupyterMessage(Struct, frozen=True):
    """One message without its envelope."""

    kind: str
    content: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    buffers: Sequence[bytes] = ()


# -- messages that a kernel publishes -------------------------------------------------------------


def shown(frame: Published, execution_count: int) -> JupyterMessage:
    """Return the message for a frame; `execution_count` is that of the running cell.

    Raise frames.Malformed.
    """
    match frame:
        case frames.Stream(name, text):
            return JupyterMessage("stream", {"name": name, "text": text})
        case frames.ExecuteResult(data, own_count, metadata):
            count = execution_count if own_count is None else own_count
            return JupyterMessage(
                "execute_result", {**_bundle(data, metadata), "execution_count": count}
            )
        case frames.UpdateDisplayData():
            return JupyterMessage("update_display_data", _display(frame))
        case frames.DisplayData():
            return JupyterMessage("display_data", _display(frame))
        case frames.ErrorFrame(ename, evalue, traceback):
            return JupyterMessage(
                "error", {"ename": ename, "evalue": evalue, "traceback": traceback}
            )
        case frames.ClearOutput(wait):
            return JupyterMessage("clear_output", {"wait": wait})
        case frames.CommOpenFrame(comm_id, target_name):
            target = {"target_name": target_name, "target_module": None}
            return _comm("comm_open", {"comm_id": comm_id, **target}, frame)
        case frames.CommClose(comm_id):
            return _comm("comm_close", {"comm_id": comm_id}, frame)
        case frames.CommMsgFrame(comm_id):
            return _comm("comm_msg", {"comm_id": comm_id}, frame)
    raise frames.MalformedFrame(f"{type(frame).__name__} is not a frame to publish")


def _bundle(data: dict[str, msgspec.Raw], metadata: msgspec.Raw) -> dict[str, Any]:
    return {"data": frames.bundle(data), "metadata": _object(metadata)}


def _display(frame: frames.DisplayData) -> dict[str, Any]:
    name = frame.transient.get("display_id")
    transient = {} if name is None else {"display_id": name}
    return {**_bundle(frame.data, frame.metadata), "transient": transient}


def _comm(
    kind: str, content: dict[str, Any], frame: frames.CommOpenFrame | frames.CommMsgFrame
) -> JupyterMessage:
    data, metadata = _object(frame.data), _object(frame.metadata)
    return JupyterMessage(kind, {**content, "data": data}, metadata, frame.buffers)


def _object(raw: msgspec.Raw) -> dict[str, Any]:
    return frames.as_object(frames.loose(raw))


# -- replies of a kernel --------------------------------------------------------------------------


def executed(end: CellEnd, reply: frames.ExecuteReply) -> dict[str, Any]:
    """Return the reply for a cell whose result comes from the kernel."""
    if reply.status == "aborted":
        return {"status": "aborted"}
    content: dict[str, Any] = {
        "status": reply.status,
        "payload": [item for item in end.payload if item.get("source") in _PAYLOADS],
        "user_expressions": end.user_expressions,
    }
    if reply.status == "error":
        content |= {"ename": reply.ename, "evalue": reply.evalue, "traceback": reply.traceback}
    return content


def completed(reply: frames.CompleteReply, code: str) -> dict[str, Any]:
    """Return the reply. Raise frames.Malformed."""
    start = min(max(reply.cursor_start, 0), len(code))
    return {
        "status": "ok",  # also after an error inside: the list of matches is empty then
        "matches": reply.matches,
        "cursor_start": start,
        "cursor_end": min(max(reply.cursor_end, start), len(code)),
        "metadata": _object(reply.metadata),
    }


def inspected(reply: frames.InspectReply) -> dict[str, Any]:
    """Return the reply. Raise frames.Malformed."""
    return {"status": "ok", "found": reply.is_found, **_bundle(reply.data, reply.metadata)}


def is_complete(reply: frames.IsCompleteReply) -> dict[str, Any]:
    indent = {"indent": reply.indent} if reply.status == "incomplete" else {}
    return {"status": reply.status, **indent}


def kernel_info(ready: frames.KernelReady) -> dict[str, Any]:
    python, ipython = _version(ready.python), _version(ready.ipython)
    major, _, minor = python.partition(".")
    short = f"{major}.{minor.partition('.')[0]}"
    return {
        "status": "ok",
        "protocol_version": PROTOCOL,
        "implementation": "sbx",
        "implementation_version": __version__,
        "language_info": {
            "name": "python",
            "version": python,
            "mimetype": "text/x-python",
            "file_extension": ".py",
            "pygments_lexer": f"ipython{major}",
            "codemirror_mode": {"name": "ipython", "version": int(major)},
            "nbconvert_exporter": "python",
        },
        "banner": f"Python {python}, IPython {ipython}, inside a sandbox of sbx {__version__}",
        "help_links": [{"text": text, "url": url.format(short)} for text, url in _HELP],
        "debugger": False,
        "supported_features": [],
    }


def _version(version: str) -> str:
    """Return the version from inside, or a default if it does not look like a version."""
    return version if _VERSION.fullmatch(version) else "3.0"


def no_debugger(seq: int, command: str) -> dict[str, Any]:
    """Return a refusal in the format of the Debug Adapter Protocol."""
    return {
        "type": "response",
        "request_seq": seq,
        "success": False,
        "command": command,
        "message": "a sandbox has no debugger",
    }


# -- other messages -------------------------------------------------------------------------------


def status(state: str) -> JupyterMessage:
    return JupyterMessage("status", {"execution_state": state})


def execute_input(code: str, execution_count: int) -> JupyterMessage:
    return JupyterMessage("execute_input", {"code": code, "execution_count": execution_count})


def error(content: Mapping[str, Any]) -> JupyterMessage:
    """Return the message for every client about a reply with an error."""
    return JupyterMessage(
        "error", {name: content[name] for name in ("ename", "evalue", "traceback")}
    )


def ended(error: RunError) -> dict[str, Any]:
    """Return the reply to a request that sbx ended, or that has no kernel."""
    return {
        "status": "error",
        "ename": error.name,
        "evalue": error.value,
        "traceback": [f"\x1b[31m{error.name}\x1b[0m: {error.value}"],
    }


def refused(error: SbxError) -> dict[str, Any]:
    """Return the reply to a request that is not served: the message and the hint."""
    message = error.message if error.hint is None else f"{error.message} (hint: {error.hint})"
    return ended(RunError(type(error).__name__, message, ""))
