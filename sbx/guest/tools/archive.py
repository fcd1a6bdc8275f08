"""Pack a directory into an archive, or unpack one, inside the walls: a command like any other.

    python -I archive.py pack DIRECTORY tar.gz|zip BYTES_MAX ENTRIES_MAX FILE_BYTES_MAX
    python -I archive.py unpack DIRECTORY BYTES_MAX ENTRIES_MAX FILE_BYTES_MAX

Hostile archives are read only here, with the rights of the code inside. Bytes cross as lines of
base64, because the output of a command is text. Each side keeps only a few blocks in memory: packed
data waits in its pipe until it is read, and data to unpack is sent on acknowledgement:

    pack      ← a block, a line each
    unpack    → a block, a line each      ← "+" acknowledges each block; an empty line ends them

The last line out is a JSON object that begins with "{": the counts, or `error` with one of the
codes in ERRORS. `too_large` also has `limit`, one of LIMITS. Standard library only.
"""

import base64
import bz2
import errno
import gzip
import io
import json
import lzma
import os
import stat
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NoReturn, cast

BLOCK = 48 * 1024  # bytes; 64 KiB of base64, which is one frame
_LEVEL = 3  # of zlib: on source text eight times as fast as 9, and 15 % larger
_COPY = 256 * 1024
_AHEAD = 8 << 20  # bytes of small files of a tar to read before any of them is created
_NO_PLACE = frozenset(
    {
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.ETXTBSY,
    }
)
_UNREADABLE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,  # from zipfile: encrypted, or an unknown compression method
)
ERRORS = (
    "not_found",
    "not_a_directory",
    "not_permitted",
    "too_large",
    "not_an_archive",
    "no_space",
    "failed",
)


LIMITS = ("bytes", "entries", "file_bytes")


class ArchiveError(Exception):
    """Ends the work. Its text is one of ERRORS, and `limit` one of LIMITS."""

    def __init__(self, word: str, limit: str | None = None) -> None:
        super().__init__(word)
        self.limit = limit


class _Out(io.RawIOBase):
    """Writes the packed data to stdout, a block at a time."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        self._pending += data
        self._position += len(data)
        while len(self._pending) >= BLOCK:
            self._send(BLOCK)
        return len(data)

    def finish(self) -> None:
        if self._pending:
            self._send(len(self._pending))

    def _send(self, size: int) -> None:
        _write_line(base64.b64encode(self._pending[:size]))
        del self._pending[:size]


class _In(io.RawIOBase):
    """Reads the data to unpack from stdin."""

    def __init__(self) -> None:
        self._pending = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._pending and not self._ended:
            self._next()
        piece = self._pending[: len(buffer)]
        self._pending = self._pending[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def drain(self) -> None:
        """Read the rest after the archive, so that the other side can end."""
        while not self._ended:
            self._next()

    def _next(self) -> None:
        line = sys.stdin.buffer.readline(2 * BLOCK)
        if not line.endswith(b"\n"):
            os._exit(1)  # the sender is gone
        self._pending = base64.b64decode(line)
        self._ended = not self._pending
        if not self._ended:
            _write_line(b"+")


class _Budget:
    """The limits of one archive, in either direction."""

    def __init__(self, bytes_max: int, entries_max: int, file_bytes_max: int) -> None:
        self._bytes = bytes_max
        self._entries = entries_max
        self._file_bytes = file_bytes_max
        self.bytes = self.entries = self.skipped = 0

    def entry(self, size: int = 0) -> None:
        self.entries += 1
        self.check(self.entries, size)
        self.take(size)

    def take(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self._bytes:
            raise ArchiveError("too_large", "bytes")

    def check(self, entries: int, largest: int) -> None:
        """Raise Refusal for too many entries, or for a file of too many bytes."""
        if entries > self._entries:
            raise ArchiveError("too_large", "entries")
        if largest > self._file_bytes:
            raise ArchiveError("too_large", "file_bytes")


# -- pack ------------------------------------------------------------------------------------------


def pack(directory: str, form: str, budget: _Budget) -> None:
    """Pack everything below `directory`. Skip all but files, directories and symlinks."""
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    out = _Out()
    if form == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as zipped:
            for name, status, file in _below(top, budget):
                _zip_one(zipped, name, status, file, budget)
    else:
        with (
            gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as packed,
            tarfile.open(
                mode="w|", fileobj=packed, format=tarfile.PAX_FORMAT, bufsize=_COPY
            ) as tar,
        ):
            for name, status, file in _below(top, budget):
                _tar_one(tar, top, name, status, file, budget)
    out.finish()


def _below(top: int, budget: _Budget) -> Iterator[tuple[str, os.stat_result, BinaryIO | None]]:
    """Yield names relative to `top`, a directory before its entries, and files as open files.

    The data comes from the file that was checked. Use no descriptor per level and no recursion, and
    open no name without a check.
    """
    pending = [""]
    while pending:
        above = pending.pop()
        try:
            names = sorted(_names(top, above))
        except OSError:
            budget.skipped += 1
            continue
        for name in names:
            path = f"{above}{name}"
            try:
                status = os.stat(path, dir_fd=top, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(f"{path}/")
                    yield path, status, None
                elif stat.S_ISLNK(status.st_mode):
                    yield path, status, None
                elif stat.S_ISREG(status.st_mode):
                    with _opened(top, path) as file:
                        yield path, os.fstat(file.fileno()), file
                else:
                    budget.skipped += 1
            except OSError:  # it vanished, or is unreadable
                budget.skipped += 1


def _names(top: int, above: str) -> list[str]:
    fd = os.open(above or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _opened(top: int, path: str) -> BinaryIO:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY, dir_fd=top)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("swapped")
    return os.fdopen(fd, "rb")


def _tar_one(
    tar: tarfile.TarFile,
    top: int,
    name: str,
    status: os.stat_result,
    file: BinaryIO | None,
    budget: _Budget,
) -> None:
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(status.st_mode) & 0o777
    member.mtime = int(status.st_mtime)
    if file is not None:
        budget.entry(status.st_size)
        member.size = status.st_size
        tar.addfile(member, _Exactly(file, status.st_size))  # type: ignore[arg-type]
        return
    budget.entry()
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    else:
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(name, dir_fd=top)
    tar.addfile(member)


class _Exactly:
    """Reads exactly `size` bytes of a file: cut if it grew, filled with zeros if it shrank."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._remaining = size

    def read(self, size: int) -> bytes:
        count = min(size, self._remaining)
        data = self._file.read(count)
        self._remaining -= count
        return data + bytes(count - len(data))


def _zip_one(
    zipped: zipfile.ZipFile,
    name: str,
    status: os.stat_result,
    file: BinaryIO | None,
    budget: _Budget,
) -> None:
    """Add one entry to a zip. Skip links: few programs unpack links of a zip."""
    shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if file is None and not stat.S_ISDIR(status.st_mode):
        budget.skipped += 1
        return
    budget.entry(status.st_size if file is not None else 0)
    member = zipfile.ZipInfo(shown if file is not None else f"{shown}/")
    member.external_attr = (status.st_mode & 0o170777) << 16
    member.compress_type = zipfile.ZIP_DEFLATED
    if file is None:
        zipped.writestr(member, b"")
        return
    exactly = _Exactly(file, status.st_size)
    with zipped.open(member, "w", force_zip64=status.st_size > 1 << 30) as target:
        while piece := exactly.read(_COPY):
            target.write(piece)


# -- unpack ----------------------------------------------------------------------------------------


def unpack(directory: str, budget: _Budget) -> None:
    """Unpack a tar, plain or compressed, or a zip into `directory`, which is made if missing."""
    os.makedirs(directory, exist_ok=True)
    source = _In()
    buffered = io.BufferedReader(source, 512 * 1024)
    try:
        if buffered.peek(4)[:4] in (b"PK\3\4", b"PK\5\6"):
            _unzip(buffered, directory, budget)
        else:
            _untar(buffered, directory, budget)
    except _UNREADABLE as error:
        raise ArchiveError("not_an_archive") from error
    except OSError as error:
        if error.errno is None:  # bz2 and gzip raise this for invalid data
            raise ArchiveError("not_an_archive") from error
        raise
    source.drain()


def _untar(source: "io.BufferedReader[_In]", directory: str, budget: _Budget) -> None:
    with (
        _plain(source) as plain,
        tarfile.open(mode="r|", fileobj=plain, bufsize=_COPY) as tar,
    ):
        # Creating a file takes four times as long as reading it. So read ahead, to refuse an
        # archive of too many small files before they are created.
        ahead: list[tuple[tarfile.TarInfo, BinaryIO]] = []
        free = _AHEAD
        for member in tar:
            if not _stays(member):
                budget.skipped += 1
                continue
            size = max(0, member.size) if member.isreg() else 0
            budget.entry(size)
            content = tar.extractfile(member) if member.isreg() else io.BytesIO()
            assert content is not None
            if size <= free:
                ahead.append((member, io.BytesIO(content.read())))
                free -= size
                continue
            _make(ahead, directory, budget)
            _make([(member, cast("BinaryIO", content))], directory, budget)
            ahead, free = [], _AHEAD
        _make(ahead, directory, budget)


def _make(
    members: "list[tuple[tarfile.TarInfo, BinaryIO]]", directory: str, budget: _Budget
) -> None:
    for member, content in members:
        with _skipping(budget):
            _untar_one(member, content, directory)


def _plain(source: "io.BufferedReader[_In]") -> BinaryIO:
    """Return a stream of the decompressed data, a piece at a time.

    tarfile's own streams decompress a whole buffer at once, and copy the rest of it for each piece:
    for zeros that is a thousand buffers.
    """
    magic = source.peek(6)
    if magic.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=source))
    if magic.startswith(b"BZh"):
        return cast("BinaryIO", bz2.BZ2File(source))
    if magic.startswith((b"\xfd7zXZ\0", b"\x5d\0\0\x80")):
        return cast("BinaryIO", lzma.LZMAFile(source))
    return source


def _stays(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a file, a directory or a link, and stays in the directory.

    Neither its name nor its link may lead out. `tarfile.data_filter` does the same, in Pythons that
    have it. This check only avoids surprises for the caller: the walls hold for any archive.
    """
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return False
    above = os.path.dirname(member.name)
    names = [member.name]
    if member.issym():
        names.append(f"{above}/{member.linkname}" if above else member.linkname)
        if member.linkname.startswith("/"):
            return False
    elif member.islnk():
        names.append(member.linkname)
    folded = map(os.path.normpath, names)
    return not any(name.startswith("/") or name.split("/")[0] == ".." for name in folded)


def _untar_one(member: tarfile.TarInfo, content: BinaryIO, directory: str) -> None:
    target = os.path.join(directory, member.name)
    if member.isdir():
        os.makedirs(target, exist_ok=True)
        return
    with _placed(target) as temporary:
        if member.issym():
            os.symlink(member.linkname, temporary)
        elif member.islnk():
            os.link(os.path.join(directory, member.linkname), temporary, follow_symlinks=False)
        else:
            with _create(temporary, member.mode & 0o777) as file:
                while piece := content.read(_COPY):
                    file.write(piece)


@contextmanager
def _placed(target: str) -> Iterator[str]:
    """Yield a temporary name in the directory of `target`; rename it to `target` at the end.

    The rename replaces any file of that name in one step, so no existing file is ever opened.
    """
    above, _, name = target.rpartition("/")
    if name in ("", ".", ".."):
        raise NotADirectoryError(target)
    os.makedirs(above, exist_ok=True)
    temporary = f"{above}/.tmp-{os.urandom(8).hex()}"  # a name that the path guard leaves free
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _create(path: str, mode: int) -> BinaryIO:
    """Create a file that its owner may read and write, in addition to `mode`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.fchmod(fd, mode | 0o600)
    return os.fdopen(fd, "wb")


@contextmanager
def _skipping(budget: _Budget) -> Iterator[None]:
    """Skip an entry whose place is taken by something else."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        budget.entries -= 1
        budget.skipped += 1


def _unzip(source: BinaryIO, directory: str, budget: _Budget) -> None:
    """Unpack a zip. Its directory is at its end, so store all of it in an unnamed file first."""
    with tempfile.TemporaryFile(dir=directory) as archive:
        while piece := source.read(_COPY):
            budget.take(len(piece))
            archive.write(piece)
        budget.bytes = 0
        with zipfile.ZipFile(archive) as zipped:
            members = zipped.infolist()
            sizes = [member.file_size for member in members]
            budget.check(len(members), max(sizes, default=0))  # before any file is created
            budget.take(sum(sizes))
            budget.bytes = 0  # counted again from the data: the header may be false
            for member in members:
                budget.entry()
                with _skipping(budget):
                    _unzip_one(zipped, member, directory, budget)


def _unzip_one(
    zipped: zipfile.ZipFile, member: zipfile.ZipInfo, directory: str, budget: _Budget
) -> None:
    kind = stat.S_IFMT(member.external_attr >> 16)
    parts = member.filename.split("/")
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or ".." in parts or not parts[0]:
        raise NotADirectoryError(member.filename)  # it leads out, or is not a file: skipped
    target = os.path.join(directory, *(part for part in parts if part not in ("", ".")))
    if member.is_dir():
        os.makedirs(target, exist_ok=True)
        return
    mode = (member.external_attr >> 16) & 0o777 or 0o644
    with (
        _placed(target) as temporary,
        zipped.open(member) as content,
        _create(temporary, mode) as file,
    ):
        while piece := content.read(_COPY):
            budget.take(len(piece))
            file.write(piece)


# -- the command -----------------------------------------------------------------------------------


def _write_line(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _error_code(error: BaseException) -> str:
    match error:
        case ArchiveError():
            return str(error)
        case OSError(errno=errno.EFBIG):
            return "too_large"
        case FileNotFoundError():
            return "not_found"
        case NotADirectoryError() | FileExistsError():
            return "not_a_directory"
        case PermissionError():
            return "not_permitted"
        case OSError(errno=errno.EROFS):
            return "not_permitted"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return "no_space"
    return "failed"


def main(arguments: list[str]) -> NoReturn:
    report: dict[str, Any]
    try:
        *_, bytes_max, entries_max, file_bytes_max = arguments
        budget = _Budget(int(bytes_max), int(entries_max), int(file_bytes_max))
        if arguments[0] == "pack":
            pack(arguments[1], arguments[2], budget)
        else:
            unpack(arguments[1], budget)
        report = {"entries": budget.entries, "bytes": budget.bytes, "skipped": budget.skipped}
    except Exception as error:  # noqa: BLE001  # the boundary: report it with one of our codes
        limit = error.limit if isinstance(error, ArchiveError) else "file_bytes"  # for EFBIG
        report = {"error": _error_code(error), "limit": limit, "why": str(error)[:200]}
    _write_line(json.dumps(report).encode("ascii"))
    sys.stdout.buffer.flush()
    os._exit(0)  # without the destructors of unfinished archives


if __name__ == "__main__":
    main(sys.argv[1:])
