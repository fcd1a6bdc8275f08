"""Replace an exact text in a file, with the expected number of occurrences, in one step.

The rest of the file keeps its bytes, line ends and encoding: UTF-8 with or without a BOM, UTF-16
and UTF-32 with a BOM. In UTF-8 the bytes of one character never begin inside another character.
Therefore bytes are replaced, and the invalid bytes of a file that is not all UTF-8 stay unchanged.
"""

import codecs
import os
import stat

from sbx.errors import BadRequest, Conflict, Denied
from sbx.linux.descriptors import closing
from sbx.workspace.errors import not_a_file, too_large, translated, wrong_path
from sbx.workspace.tree import Relative, Tree

SIZE_MAX = 16 << 20  # bytes of a file, before and after

# The longer marks first, because a shorter mark is the beginning of a longer one.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


# Set the read, write and execute permissions of a file or a directory, but never a set-id bit.
#
# The mode is set on the checked inode, so replacing the name has no effect. Only files of the jail
# can be changed.
def chmod(tree: Tree, relative: Relative, mode: int, *, in_host_directory: bool = False) -> None:
    """Set the permissions to `mode`, 0 to 0o777.

    `in_host_directory`: refuse a file with further hard links, which may be outside the directory.

    Raises Denied `set_id_refused` for a set-user-id, set-group-id or sticky bit, BadRequest
    `invalid_mode`, and Denied `file_not_permitted` for a file that is not the sandbox's.
    """
    check_mode(mode)
    path = tree.shown(relative)
    uid = os.geteuid() if tree.owner is None else tree.owner[0]
    with translated(path), closing(tree.hold(relative)) as fd:
        status = os.fstat(fd)
        if stat.S_ISLNK(status.st_mode):
            raise wrong_path(path, "symlink", "is a symlink, which the host never follows")
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise not_a_file(path)
        if status.st_uid != uid:
            raise Denied(
                f"'{path}' belongs to another user of the host",
                code="file_not_permitted",
                hint="only files of the sandbox can be changed",
            )
        if in_host_directory and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise Denied(
                f"'{path}' has further hard links, which may be outside of the directory",
                code="file_not_permitted",
                hint="replace it by a copy first",
            )
        os.chmod(f"/proc/self/fd/{fd}", mode)


def check_mode(mode: int) -> None:
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise BadRequest(
            "a mode must be a number from 0 to 0o777",
            code="invalid_mode",
            hint="0o644 for a file, 0o755 for a program or a directory",
            details={"field": "mode"},
        )
    if mode & ~0o777:
        raise Denied(
            f"the mode {mode:#o} has a set-id or a sticky bit, which is never set",
            code="set_id_refused",
            hint="use the lower nine bits only",
            details={"field": "mode"},
        )


def replace(
    tree: Tree, relative: Relative, old: str, new: str, *, count: int | None, max_bytes: int
) -> int:
    """Replace `old` by `new`, and return the number of replacements.

    There must be `count` occurrences, or with None at least one. Raises BadRequest
    `nothing_to_replace` for an empty `old`, Conflict `replace_count` for another number of
    occurrences (`details["found"]`), Conflict `file_changed` if another process wrote the file in
    the meantime, and TooLarge. Nothing is written then.
    """
    limit = min(max_bytes, SIZE_MAX)
    path = tree.shown(relative)
    with tree.open(relative) as file:
        if file.size > limit:
            raise too_large(path, limit)
        before = _identity(os.fstat(file.fd))
        content = b"".join(file.chunks())
    replaced, occurrences = replaced_bytes(content, old, new, most=limit)
    if occurrences == 0 or (count is not None and occurrences != count):
        expected = "at least once" if count is None else f"{count} times"
        raise Conflict(
            f"the text occurs {occurrences} times in '{path}'; expected: {expected}",
            code="replace_count",
            hint="read the file: the text must be the same, with its white space"
            if not occurrences
            else "read the file, and use more of the surrounding text, or set count",
            details={"found": occurrences, "expected": count},
        )
    if replaced is None:
        raise too_large(path, limit)
    intake = tree.writing(relative, max_bytes=limit)
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
            return occurrences
    finally:
        intake.close()
    raise AssertionError("an intake continues after its end")


def replaced_bytes(
    content: bytes, old: str, new: str, *, most: int = SIZE_MAX
) -> tuple[bytes | None, int]:
    """Return the content with `old` replaced, and the number of occurrences. Pure.

    For a content of more than `most` bytes, return None instead, and do not create it: it could be
    millions of times as large. Raises BadRequest.
    """
    if not old:
        raise BadRequest(
            "the text to replace is empty",
            code="nothing_to_replace",
            hint="use a text that is in the file",
        )
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), None)
    try:
        if encoding is None:
            old_bytes, new_bytes = old.encode(), new.encode()
            occurrences = content.count(old_bytes)
            if len(content) + occurrences * (len(new_bytes) - len(old_bytes)) > most:
                return None, occurrences
            return content.replace(old_bytes, new_bytes), occurrences
        text = content.decode(encoding)
        occurrences = text.count(old)
        if (
            len(text) + occurrences * (len(new) - len(old)) > most
        ):  # each character has at least one byte
            return None, occurrences
        replaced = text.replace(old, new).encode(encoding)
        return (replaced if len(replaced) <= most else None), occurrences
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text cannot be encoded: {error.reason}",
            code="invalid_content",
            hint="use text without lone surrogates",
        ) from error
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"the file has the mark of {encoding}, but its content is invalid",
            code="not_text",
            hint="use read_bytes",
        ) from error


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
