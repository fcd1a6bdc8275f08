"""The uploads of a conversation: files in one directory, read-only inside, replaced in one step.

    put   stream to a staging directory outside every view, hashing → limits → sync → rename

The SHA-256 is an extended attribute of the file, set before the rename. So a crash cannot leave a
second record with a wrong value. The code inside cannot change it, because it sees the directory
through a read-only mount. If the file system has no extended attributes, it is computed again.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from msgspec import Struct

from sbx.errors import BadRequest, Conflict, NotFound, TooLarge
from sbx.linux.descriptors import closing
from sbx.protocol.files import FileEntry, Upload
from sbx.protocol.surroundings import Surroundings, printable
from sbx.workspace.errors import is_a_directory, not_a_file, too_large, translated
from sbx.workspace.paths import GENERATED, UPLOADS, UPLOADS_APART, check_name
from sbx.workspace.safe_open import encoded
from sbx.workspace.streams import (
    CHUNK,
    FileWriter,
    OpenFile,
    ReceivedFile,
    StagedFile,
    drive,
    read_chunks,
)
from sbx.workspace.tree import Tree

_MODE = 0o444  # the jail may have another uid
_ATTRIBUTE = "user.sbx.sha256"
_LISTED = 100_000


# The text about the files of a conversation for the system prompt of a model.
_LISTED_MAX = 500  # files in one prompt


def uploads_told(uploads: Sequence[Upload], around: Surroundings) -> str:
    """Return the text for a system prompt about the files in these surroundings.

    The user chooses the names. So each name has its own line, and unprintable characters are
    escaped: a name cannot pass for a sentence of the prompt.
    """
    is_on_host = around.place == "host"
    root = f"{UPLOADS if around.place == 'workspace' else UPLOADS_APART}/"
    lines = [f"The files that the user uploaded are in {root}, which is read-only."]
    if is_on_host:  # the directory exists with the first upload
        lines = ["The user uploaded files. Do not change them."] if uploads else []
    if uploads:
        lines.append("These are all of them, with their full paths:")
        lines += [
            f"- {printable(upload.path)} ({upload.size} bytes)" for upload in uploads[:_LISTED_MAX]
        ]
        if len(uploads) > _LISTED_MAX:
            lines.append(f"- and {len(uploads) - _LISTED_MAX} more: list their directory")
    else:
        lines.append("The user uploaded no files." if is_on_host else "There are no files yet.")
    if around.place == "workspace":
        lines.append(f"Write the files that you generate to {GENERATED}/.")
        lines.append(
            "The working directory is /workspace; files that you write there are kept as well."
        )
    else:
        lines.append(
            f"The working directory is {around.shown_directory}: a directory that belongs to the"
            " user."
        )
    return "\n".join(lines)


class UploadLimits(Struct, frozen=True):
    """The limits of uploads; None means no limit. Sizes are in bytes. Types are extensions in lower
    case, without the dot."""

    max_file_size: int | None = None
    max_file_count: int | None = None
    max_total_bytes: int | None = None
    allowed_types: frozenset[str] | None = None


_NO_LIMITS = UploadLimits()


class Uploads:
    """The uploads of one conversation, in `tree`, which must have a staging directory.

    Methods are safe for threads. One process has one object per conversation, which enforces the
    limits.
    """

    def __init__(self, tree: Tree) -> None:
        assert tree.staging is not None
        self.tree = tree
        self._staging = tree.staging
        self._commit = threading.Lock()
        self._hashes: dict[tuple[int, int, int], str] = {}

    def put(
        self,
        name: str,
        data: bytes | Iterable[bytes] | Path | ReceivedFile,
        limits: UploadLimits = _NO_LIMITS,
    ) -> Upload:
        """Store `data`, or the content of the host file at a Path, or a received file, as `name`.

        A file of that name is replaced. A failure changes nothing. Raises InvalidPath, NotFound
        (for the Path), Unavailable `no_space`, and if a limit is exceeded, BadRequest
        `file_type_not_allowed`, Conflict `too_many_files`, TooLarge `file_too_large` or
        `uploads_too_large`. `details["limit"]` is the limit.
        """
        if isinstance(data, ReceivedFile):
            return drive(self.putting(name, limits, data), ())
        return drive(self.putting(name, limits), _chunks(data))

    def putting(
        self,
        name: str,
        limits: UploadLimits = _NO_LIMITS,
        received: ReceivedFile | None = None,
    ) -> FileWriter[Upload]:
        """Store an upload chunk by chunk, like `put`; see `FileWriter`. A `received` file is
        complete, and is not copied."""
        path = self.tree.shown((check_name(name),))
        _check_type(name, limits)
        others = self._others(name)  # now, before reading a long body, and again after it
        others.check(0, limits)
        digest = hashlib.sha256()
        with translated(path), self._opened() as root:
            staged = StagedFile(self._staging, beside=root, received=received)
        with staged:
            _check_size(staged.size, path, limits)
            while (chunk := (yield)) is not None:
                size = staged.size + len(chunk)
                _check_size(size, path, limits)
                others.check(size, limits)
                with translated(path):
                    staged.write(chunk)
                digest.update(chunk)
            sha256 = digest.hexdigest() if received is None else received.sha256
            with self._commit, translated(path):
                self._others(name).check(staged.size, limits)
                _remember(staged.fd, sha256)
                with self._opened() as root:
                    staged.commit(root, encoded(name), mode=_MODE, owner=None)
            uploaded_at = os.fstat(staged.fd).st_mtime
            return Upload(name, staged.size, sha256, path, uploaded_at)

    def _opened(self) -> closing:
        return closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.tree.fd))

    def list(self) -> tuple[Upload, ...]:
        """Return all uploads, sorted by name."""
        uploads = []
        for entry in self._entries():
            with suppress(NotFound):  # deleted since its name was read
                uploads.append(self.get(entry.name))
        return tuple(uploads)

    def get(self, name: str) -> Upload:
        """Describe one upload. Raises InvalidPath, NotFound `file_not_found`."""
        with self.open(name) as file:
            return self.described(name, file)

    def described(self, name: str, file: OpenFile) -> Upload:
        """Describe the upload that is open as `file`, even if it was replaced since."""
        with translated(file.path):
            return Upload(name, file.size, self._sha256(file), file.path, file.modified_s)

    def open(self, name: str) -> OpenFile:
        """Open one upload for streaming. The caller closes it. Raises the errors of `get`."""
        return self.tree.open((check_name(name),))

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of one upload. Raises the errors of `get`, and TooLarge."""
        return self.tree.read((check_name(name),), max_bytes=max_bytes)

    def delete(self, name: str) -> None:
        """Delete one upload. Raises InvalidPath, NotFound `file_not_found`."""
        with self._commit:
            self.tree.delete((check_name(name),))

    def close(self) -> None:
        self.tree.close()

    def _entries(self) -> Iterator[FileEntry]:
        return (entry for entry in self.tree.list(max_entries=_LISTED) if entry.kind == "file")

    def _others(self, name: str) -> "_Others":
        sizes = [entry.size or 0 for entry in self._entries() if entry.name != name]
        return _Others(len(sizes), sum(sizes))

    def _sha256(self, file: OpenFile) -> str:
        with suppress(OSError):
            return os.getxattr(file.fd, _ATTRIBUTE).decode("ascii")
        status = os.fstat(file.fd)
        key = (status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in self._hashes:
            digest = hashlib.sha256()
            for chunk in file.chunks():
                digest.update(chunk)
            if len(self._hashes) >= _LISTED:
                self._hashes.clear()
            self._hashes[key] = digest.hexdigest()
        return self._hashes[key]


class _Others(Struct, frozen=True):
    """The number and size of the other uploads, for the check of the limits."""

    count: int
    size: int

    def check(self, size: int, limits: UploadLimits) -> None:
        if limits.max_file_count is not None and self.count >= limits.max_file_count:
            raise Conflict(
                f"there are {self.count} uploads already, and the limit is {limits.max_file_count}",
                code="too_many_files",
                hint="delete an upload, or replace one by using its name",
                details={"limit": limits.max_file_count},
            )
        if limits.max_total_bytes is not None and self.size + size > limits.max_total_bytes:
            raise TooLarge(
                f"all uploads together would exceed the limit of {limits.max_total_bytes} bytes",
                code="uploads_too_large",
                hint="delete an upload",
                details={"limit": limits.max_total_bytes},
            )


def _check_size(size: int, path: str, limits: UploadLimits) -> None:
    if limits.max_file_size is not None and size > limits.max_file_size:
        raise too_large(path, limits.max_file_size)


def _check_type(name: str, limits: UploadLimits) -> None:
    extension = PurePosixPath(name).suffix.removeprefix(".").lower()
    if limits.allowed_types is not None and extension not in limits.allowed_types:
        allowed = sorted(limits.allowed_types)
        raise BadRequest(
            f"'{name}' has a type that is not allowed; allowed are {', '.join(allowed)}",
            code="file_type_not_allowed",
            hint="convert the file, or use a policy that allows its type",
            details={"limit": allowed},
        )


def _chunks(data: bytes | Iterable[bytes] | Path) -> Iterable[bytes]:
    if isinstance(data, bytes):
        return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))
    return _host_file(data) if isinstance(data, Path) else data


def _host_file(path: Path) -> Iterator[bytes]:
    """Yield the content of a file that the embedding program named. Follow its symlinks."""
    with translated(str(path)):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with closing(fd):
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise is_a_directory(str(path))
        if not stat.S_ISREG(mode):
            raise not_a_file(str(path))
        with translated(str(path)):
            yield from read_chunks(fd)


def _remember(fd: int, sha256: str) -> None:
    with suppress(OSError):  # the file system has no attributes: compute it again later
        os.setxattr(fd, _ATTRIBUTE, sha256.encode("ascii"))
