"""Replace text in a file: exactly what is named, exactly as often as is expected, in one step.

The rest of the file keeps its bytes, line ends and encoding: UTF-8 with or without a mark, UTF-16
and UTF-32 with one. In UTF-8 the bytes of one character never begin within another one, so bytes
are replaced and a file that is not all UTF-8 stays what it is.
"""

import codecs
import os

from sbx.errors import BadRequest, Conflict
from sbx.workspace.refusals import too_large
from sbx.workspace.tree import Relative, Tree

SIZE_MAX = 16 << 20  # bytes of a file, before and after

# The longer ones first: one mark begins another.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def replace(
    tree: Tree, relative: Relative, old: str, new: str, *, count: int | None, max_bytes: int
) -> int:
    """How often `old` was replaced by `new`: `count` times, or with None as often as it is there.

    Raises BadRequest `nothing_to_replace` for an empty `old`, Conflict `replace_count` where it is
    there otherwise (`details["found"]`), Conflict `file_changed` when somebody else wrote
    meanwhile, TooLarge; nothing is written then.
    """
    most = min(max_bytes, SIZE_MAX)
    path = tree.shown(relative)
    with tree.open(relative) as file:
        if file.size > most:
            raise too_large(path, most)
        before = _identity(os.fstat(file.fd))
        content = b"".join(file.chunks())
    replaced, found = replaced_bytes(content, old, new, most=most)
    if found == 0 or (count is not None and found != count):
        wanted = "at least once" if count is None else f"{count} times"
        raise Conflict(
            f"the text is {found} times in '{path}', and was expected {wanted}",
            code="replace_count",
            hint="read the file, and give more of the text around it; count says how often",
            details={"found": found, "expected": count},
        )
    if replaced is None:
        raise too_large(path, most)
    intake = tree.writing(relative, max_bytes=most)
    try:
        intake.send(None)
        intake.send(replaced)
        with tree.open(relative) as file:
            if _identity(os.fstat(file.fd)) != before:
                raise Conflict(
                    f"'{path}' was changed while its text was replaced",
                    code="file_changed",
                    hint="read it again, and try again",
                )
        try:
            intake.send(None)
        except StopIteration:
            return found
    finally:
        intake.close()
    raise AssertionError("an intake goes on after its end")


def replaced_bytes(
    content: bytes, old: str, new: str, *, most: int = SIZE_MAX
) -> tuple[bytes | None, int]:
    """The content with `old` replaced, and how often it was there; pure. None for one that would
    have more than `most` bytes: it is not made, since it could be millions of times as large.

    Raises BadRequest.
    """
    if not old:
        raise BadRequest(
            "the text to be replaced is empty",
            code="nothing_to_replace",
            hint="name the text that is there now",
        )
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), None)
    try:
        if encoding is None:
            wanted, given = old.encode(), new.encode()
            found = content.count(wanted)
            if len(content) + found * (len(given) - len(wanted)) > most:
                return None, found
            return content.replace(wanted, given), found
        text = content.decode(encoding)
        found = text.count(old)
        if len(text) + found * (len(new) - len(old)) > most:  # no character has less than a byte
            return None, found
        replaced = text.replace(old, new).encode(encoding)
        return (replaced if len(replaced) <= most else None), found
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text cannot be written: {error.reason}",
            code="invalid_content",
            hint="use text without lone surrogates",
        ) from error
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"the file begins as {encoding} and is not", code="not_text", hint="use read_bytes"
        ) from error


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
