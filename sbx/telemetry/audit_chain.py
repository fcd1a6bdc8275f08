"""The lines of the audit log: their chain of hashes, their signatures, and the check of both.

A line is `{"at":…,"who":…,"what":…,"object":…,"details":{…},"hash":"…"}`. Its hash is SHA-256 over
the hash of the line before it, in hex (64 zeros before the first line), and the line's own bytes up
to `,"hash"`. A line that is changed, added, moved or removed therefore breaks the chain at that
place. The chain cannot show that its end was cut off, or that an attacker wrote a whole new chain.
To detect this, compare `Verified.head` with a value that was recorded elsewhere.

With a key, each line also has `"sig":"…"` before its hash. The signature is HMAC-SHA-256 over the
hash of the line before it and the line's own bytes up to `,"sig"`. An attacker without the key
therefore cannot write a valid new chain, whichever copy of the log is checked. Lines from before
the key was set have no signature. The first signed line follows as soon as the log is opened with a
key, and every later line has a signature.

A log that is rotated consists of several files, `audit-*.jsonl` in the order of their names and
then `audit.jsonl`. The chain continues from each file to the next: the first line of a file is
`audit.rotated` and has the head, the name and the line count of what came before it. The oldest
files may be moved away. The check then begins with the oldest one that is left, and reports the
number of lines before it.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sbx.errors import Unavailable, is_disk_full
from sbx.telemetry.audit_rotation import ROTATED, rotated_files

FIRST = "0" * 64
TORN = "audit.torn"
SIGNED = "audit.signed"
_LINE_MAX = 16 * 1024  # bytes; details that would make a line longer are left out
_SEAM = b',"hash":"'
_END = b'"}\n'
_SIGNATURE = re.compile(rb',"sig":"([0-9a-f]{64})"$')  # no text in a line has a quote unescaped
WHOLE_LINE = re.compile(rb'^\{.*,"hash":"([0-9a-f]{64})"\}\n', re.MULTILINE)


class Verified(Struct, frozen=True):
    """The result of `verify`.

    `count` is the number of whole lines up to the end or up to `broken_at`, the first line (from 1)
    at which the chain is broken. `head` is the hash of the last valid line. `torn` is the number of
    lines that a full disk or a power cut tore, each reported by the next line. `signed` is the
    number of lines with a signature. With a key, all signatures were checked. `files` is the number
    of files, `broken_in` the one with `broken_at`, and `earlier` the number of lines in older files
    that are no longer there.
    """

    count: int
    ok: bool
    broken_at: int | None
    head: str
    torn: int
    signed: int = 0
    files: int = 1
    broken_in: Path | None = None
    earlier: int = 0


def verify(path: Path, key: bytes | None = None) -> Verified:
    """Check the whole chain, with the rotated files of the log, in bounded memory. This is safe
    while the service writes.

    With the `key` of the log, also check the signatures: the last line must have one. Raise
    Unavailable `audit_unusable` if the log cannot be read.
    """
    while True:
        complete = rotated_files(path)
        # A rotation that was killed between its renames leaves complete files only.
        files = complete if complete and not path.exists() else [*complete, path]
        try:
            result = _verify(files, key)
        except Unavailable:
            if rotated_files(path) == complete:
                raise
            continue
        if rotated_files(path) == complete:  # else the log was rotated meanwhile
            return result


def _verify(files: Sequence[Path], key: bytes | None) -> Verified:
    chain = _Chain(key)
    for file in files:
        chain.begin_file()
        with translate_errors(file), file.open("rb") as log:
            while chain.broken_at is None and (piece := log.readline(2 * _LINE_MAX)):
                chain.add(piece)
        if chain.broken_at is not None:
            break
    result = chain.ended()
    return replace(result, files=len(files), broken_in=None if result.ok else file)


class _Chain:
    def __init__(self, key: bytes | None) -> None:
        self.broken_at: int | None = None
        self._key = key
        self._signed = 0
        self._last_whole_at = 0
        self._lines = 0
        self._count = 0
        self._torn = 0
        self._head = FIRST
        self._rest_from: int | None = None  # the number of the first torn piece
        self._rest = hashlib.sha256()
        self._last = b""
        self._earlier = 0

    def begin_file(self) -> None:
        """Count lines from 1 again. Torn pieces at the end of a file are never completed."""
        if self._rest_from is not None:
            self.broken_at = self._rest_from
        self._lines = 0

    def add(self, piece: bytes) -> None:
        self._lines += 1
        self._last = piece
        match = WHOLE_LINE.fullmatch(piece if piece.endswith(b"\n") else piece + b"\n")
        if match is None:
            self._rest_from = self._rest_from or self._lines
            self._rest.update(piece)
            return
        body = piece[: match.start(1) - len(_SEAM)]
        if self._is_first() and (before := _before(body)) is not None:
            self._head, self._earlier = before
        digest = _chain_hash(self._head, body)
        if (
            digest != match[1].decode()
            or not self._reports_torn_pieces(body)
            or not self._has_valid_signature(body)
        ):
            self.broken_at = self._rest_from or self._lines
            return
        self._head = digest
        self._count += 1
        self._last_whole_at = self._lines
        if self._rest_from is not None:
            self._torn += 1
            self._rest_from, self._rest = None, hashlib.sha256()

    def _is_first(self) -> bool:
        return self._lines == 1 and self._count == 0 and self._rest_from is None

    def _has_valid_signature(self, body: bytes) -> bool:
        """Return whether the signature is valid. After the first signature, every line must have
        one.

        Without a key, a signature is counted but not checked.
        """
        match = _SIGNATURE.search(body)
        if match is None:
            return not self._signed
        self._signed += 1
        if self._key is None:
            return True
        expected = _signature(self._key, self._head, body[: match.start()])
        return hmac.compare_digest(expected, match[1].decode())

    def _reports_torn_pieces(self, body: bytes) -> bool:
        """Return whether the line reports the torn pieces before it, and only those."""
        try:
            entry = json.loads(body + b"}")
            digest = entry["details"]["sha256"] if entry["what"] == TORN else None
        except (ValueError, KeyError, TypeError):
            return False
        return digest == (None if self._rest_from is None else self._rest.hexdigest())

    def ended(self) -> Verified:
        if self._rest_from is not None and self.broken_at is None:
            if self._rest_from == self._lines and not self._last.endswith(b"\n"):
                self._torn += 1  # nothing was written after it
            else:
                self.broken_at = self._rest_from
        if self._key is not None and self._count and not self._signed and self.broken_at is None:
            self.broken_at = self._last_whole_at
        ok = self.broken_at is None
        return Verified(
            *(self._count, ok, self.broken_at, self._head, self._torn, self._signed),
            earlier=self._earlier,
        )


def _before(body: bytes) -> tuple[str, int] | None:
    """Return the head and the count of the lines before a file that begins with this line."""
    try:
        entry = json.loads(body + b"}")
        details = entry["details"]
        if entry["what"] == ROTATED:
            return str(details["head"]), int(details["count"])
    except (ValueError, KeyError, TypeError):
        pass
    return None


def format_line(entry: dict[str, Any], head: str, key: bytes | None) -> tuple[bytes, str]:
    """Return the line for an entry, and its hash. Details that are too long are left out."""
    text = to_json(entry)
    if len(text) > _LINE_MAX:
        text = to_json(entry | {"details": {"left_out": len(text)}})
    body = text[:-1].encode()
    if key is not None:
        body += b',"sig":"' + _signature(key, head, body).encode() + b'"'
    digest = _chain_hash(head, body)
    return body + _SEAM + digest.encode() + _END, digest


def to_json(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), default=str)  # ASCII: one character, one byte


def _signature(key: bytes, head: str, body: bytes) -> str:
    return hmac.new(key, head.encode() + body, hashlib.sha256).hexdigest()


def is_signed(line: bytes) -> bool:
    return _SIGNATURE.search(line.rpartition(_SEAM)[0]) is not None


def _chain_hash(head: str, body: bytes) -> str:
    return hashlib.sha256(head.encode() + body).hexdigest()


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"the audit log {path} cannot be used: {error.strerror or error}",
            code="no_space" if is_disk_full(error) else "audit_unusable",
        ) from error
