"""read_file, write_file, edit_file, list_files, with the paths that code uses (paths.py)."""

import asyncio
import codecs
import mimetypes
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools import paths
from sbx.agent.tools.results import RESULT_MAX, cut
from sbx.agent.tools.tool import Arguments, ToolCallRequest, ToolDefinition, define_builtin
from sbx.aio import in_thread, kept_with
from sbx.errors import BadRequest, Conflict
from sbx.protocol.files import FileEntry
from sbx.protocol.surroundings import Surroundings
from sbx.workspace.edit import SIZE_MAX, replaced_bytes
from sbx.workspace.errors import too_large
from sbx.workspace.paths import UPLOADS_APART

_TEXT_MAX = RESULT_MAX - 1024  # characters of a file in one result
_LINES = 2000  # the default limit
_LINE_MAX = 2000  # characters
_ENTRIES_MAX = 500
_PLACES_TOLD = 10
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG", "PNG image"),
    (b"\xff\xd8\xff", "JPEG image"),
    (b"GIF8", "GIF image"),
    (b"%PDF", "PDF document"),
    (b"PK\x03\x04", "zip archive (or xlsx, docx, jar …)"),
    (b"\x1f\x8b", "gzip archive"),
    (b"\x7fELF", "ELF program"),
    (b"SQLite format 3\0", "SQLite database"),
    (b"PAR1", "Parquet table"),
    (codecs.BOM_UTF16_LE, "text in UTF-16"),
    (codecs.BOM_UTF16_BE, "text in UTF-16"),
)


def _definition(
    around: Surroundings,
    name: str,
    description: str,
    properties: dict[str, Any],
    *,
    required: Sequence[str] = (),
    reads: bool = False,
) -> ToolDefinition | None:
    """Return the definition of a tool with a `path`; None where tools access no files."""
    if "filesystem" not in around.capabilities:
        return None
    path = {"type": "string", "minLength": 1, "description": _paths(around, reads=reads)}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {**properties, "path": {**path, **properties["path"]}},
        **({"required": list(required)} if required else {}),
        "additionalProperties": False,
    }
    return ToolDefinition(name, description, parameters)


def _paths(around: Surroundings, *, reads: bool) -> str:
    if around.place == "host":
        return f"Relative to {around.shown_directory}, or an absolute path of this computer."
    below = [around.shown_directory]
    if reads and around.place == "directory":
        below.append(UPLOADS_APART)
    if around.run_languages:  # a program inside reaches it
        below.append(paths.TMP)
    return f"Relative to {around.shown_directory}, or below {' or '.join(below)}."


# -- read_file -------------------------------------------------------------------------------------


async def _read_file(call: ToolCallRequest, arguments: Arguments) -> str:
    path = arguments["path"]
    text = _text(path, await paths.read(call.sandbox, path))
    if "offset" in arguments or "limit" in arguments:
        return _numbered(text, arguments.get("offset", 1), arguments.get("limit", _LINES))
    if not text:
        return "(the file is empty)"
    return cut(text, _TEXT_MAX, "; read them with offset and limit")


def _text(path: str, content: bytes) -> str:
    """Return the content as text. Raise BadRequest `not_text`, with its size and type, if it is not
    text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        return text
    raise BadRequest(
        f"'{path}' is not UTF-8 text: {len(content)} bytes, {_kind_of_content(path, content)}",
        code="not_text",
        hint="read it with code, with a library for this type",
        details={"size": len(content)},
    )


def _kind_of_content(path: str, content: bytes) -> str:
    for magic, kind in _MAGIC:
        if content.startswith(magic):
            return kind
    guessed = mimetypes.guess_type(posixpath.basename(path))[0]
    return f"{guessed} by its name" if guessed else "of an unknown binary type"


def _numbered(text: str, offset: int, limit: int) -> str:
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if offset > len(lines):
        raise BadRequest(
            f"offset {offset} is beyond the end: the file has {len(lines)} lines",
            code="invalid_arguments",
            details={"field": "offset"},
        )
    shown: list[str] = []
    room = _TEXT_MAX
    for number, line in enumerate(lines[offset - 1 : offset - 1 + limit], offset):
        row = f"{number:>6}\t{cut(line.rstrip(chr(13)), _LINE_MAX)}"
        room -= len(row) + 1
        if room < 0 and shown:
            break
        shown.append(row)
    last = offset + len(shown) - 1
    rest = "" if last == len(lines) else f"; continue with offset {last + 1}"
    return "\n".join([*shown, f"[lines {offset} to {last} of {len(lines)}{rest}]"])


def _define_read_file(around: Surroundings) -> ToolDefinition | None:
    return _definition(
        around,
        "read_file",
        "Read a text file. With offset or limit its lines are numbered. Binary files are"
        " refused, with their size and type.",
        {
            "path": {},
            "offset": {
                "type": "integer",
                "minimum": 1,
                "description": "The first line to read, from 1.",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "description": f"How many lines; {_LINES} where only offset is given.",
            },
        },
        required=["path"],
        reads=True,
    )


READ_FILE = define_builtin(
    _define_read_file, _read_file, lambda _arguments: "read", idempotent=True
)


# -- write_file ------------------------------------------------------------------------------------


async def _write_file(call: ToolCallRequest, arguments: Arguments) -> str:
    path = arguments["path"]
    async with _changing(call.sandbox):
        size = await paths.write(call.sandbox, path, arguments["content"].encode())
    return f"wrote {size} bytes to {path}"


def _define_write_file(around: Surroundings) -> ToolDefinition | None:
    return _definition(
        around,
        "write_file",
        "Write a text file whole: what was there is replaced, and directories are made as"
        " needed. To change a part of a file use edit_file.",
        {"path": {}, "content": {"type": "string", "description": "All of its text."}},
        required=["path", "content"],
    )


WRITE_FILE = define_builtin(_define_write_file, _write_file, lambda _arguments: "write")


# -- edit_file -------------------------------------------------------------------------------------


async def _edit_file(call: ToolCallRequest, arguments: Arguments) -> str:
    path, old, new = arguments["path"], arguments["old_string"], arguments["new_string"]
    async with _changing(call.sandbox):
        content, every = await paths.read(call.sandbox, path), arguments.get("replace_all", False)
        replaced, report = await in_thread(_edited, path, content, old, new, every)
        await paths.write(call.sandbox, path, replaced)
    return report


def _edited(path: str, content: bytes, old: str, new: str, every: bool) -> tuple[bytes, str]:
    """Return the new content and the report. Raise as `_check_edit`, and TooLarge before the
    content exists: the model chooses both factors of its size."""
    text = _text(path, content)
    _check_edit(path, text, old, new, text.count(old), every=every)
    replaced, times = replaced_bytes(content, old, new)
    if replaced is None:
        raise too_large(path, SIZE_MAX)
    return (
        replaced,
        f"replaced {_times(times)} in {path}, at {_lines_of(text, old)} of the old text",
    )


def _check_edit(path: str, text: str, old: str, new: str, times: int, *, every: bool) -> None:
    """Raise BadRequest `nothing_to_replace`, Conflict `not_found_in_file`, `not_unique`."""
    if old == new:
        raise BadRequest("old_string and new_string are the same", code="nothing_to_replace")
    if times == 0:
        raise Conflict(
            f"old_string is not in '{path}'", code="not_found_in_file", hint=_why_not(text, old)
        )
    if times > 1 and not every:
        raise Conflict(
            f"old_string is in '{path}' {_times(times)}, at {_lines_of(text, old)}",
            code="not_unique",
            hint="include more of the surrounding text, or set replace_all",
            details={"count": times},
        )


def _why_not(text: str, old: str) -> str:
    """Return the most likely reason why the text does not contain `old`."""
    if "\r\n" in text and text.count(old.replace("\n", "\r\n")):
        return "the file's lines end in CRLF (\\r\\n), those of old_string in LF (\\n)"
    words = re.compile(r"\s+")
    if (sought := words.sub(" ", old).strip()) and sought in words.sub(" ", text):
        return "it is there with other white space; read_file shows the exact text"
    return "read_file shows the exact text; line numbers do not belong to it"


def _lines_of(text: str, old: str) -> str:
    """Return the lines at which `old` begins, up to a limit."""
    lines: list[str] = []
    offset, line = 0, 1
    while len(lines) < _PLACES_TOLD and (position := text.find(old, offset)) >= 0:
        line += text.count("\n", offset, position)
        lines.append(str(line))
        line += old.count("\n")
        offset = position + len(old)
    more = ", …" if text.find(old, offset) >= 0 else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(lines)}{more}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _define_edit_file(around: Surroundings) -> ToolDefinition | None:
    return _definition(
        around,
        "edit_file",
        "Replace a text in a file by another. The old one must be in the file exactly once,"
        " white space included, unless replace_all is set.",
        {
            "path": {},
            "old_string": {"type": "string", "minLength": 1},
            "new_string": {"type": "string"},
            "replace_all": {"type": "boolean", "default": False},
        },
        required=["path", "old_string", "new_string"],
    )


EDIT_FILE = define_builtin(_define_edit_file, _edit_file, lambda _arguments: "write")


# -- list_files ------------------------------------------------------------------------------------


async def _list_files(call: ToolCallRequest, arguments: Arguments) -> str:
    path, pattern = arguments.get("path", "."), arguments.get("pattern", "*")
    listing = await paths.listed(call.sandbox, path, pattern, _ENTRIES_MAX)
    if not listing:
        return "(nothing matches)" if pattern != "*" else "(the directory is empty)"
    rows = [_row(entry) for entry in listing]
    if not listing.complete:
        rows.append(f"[only the first {len(listing)} entries: name a directory or a pattern]")
    return "\n".join(rows)


def _row(entry: FileEntry) -> str:
    size = "" if entry.size is None else f"{entry.size}"
    return f"{entry.kind:<9} {size:>12}  {_on_one_line(entry.path)}"


def _on_one_line(path: str) -> str:
    """Escape special characters: a file name could imitate several lines of the listing."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in path
    )


def _define_list_files(around: Surroundings) -> ToolDefinition | None:
    return _definition(
        around,
        "list_files",
        "List what is in a directory: kind, size in bytes, path. A pattern other than * is"
        " looked for in the directories below, too: *.csv, src/**/test_*.",
        {"path": {"default": "."}, "pattern": {"type": "string", "minLength": 1, "default": "*"}},
        reads=True,
    )


LIST_FILES = define_builtin(
    _define_list_files, _list_files, lambda _arguments: "read", idempotent=True
)


# -- one change at a time --------------------------------------------------------------------------


def _changing(sandbox: ToolSandbox) -> asyncio.Lock:
    """Return the lock for changes: the calls of one answer run in parallel, and one of two edits of
    a file would be lost."""
    return kept_with(sandbox, asyncio.Lock)
