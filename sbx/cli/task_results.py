"""The results of tasks in files: for `sbx task run --resume`, and the cache of a template."""

import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from sbx.errors import BadRequest
from sbx.protocol.files import FileEntry, Listing

FILES_MAX = 32 << 20  # bytes of the files of one result
_CACHE_MAX = 256 << 20  # bytes of all results


class StoredResult(Struct, frozen=True):
    """`files`: by their paths below /workspace."""

    answer: str
    files: dict[str, bytes]


class KeptFiles:
    """The files of a result, with the calls by which `save_files` reads those of a sandbox."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = self
        self._files = {f"/workspace/{path}": content for path, content in files.items()}

    async def list(self, path: str, *, max_depth: int) -> Listing:
        return Listing(
            FileEntry(each.rpartition("/")[2], each, "file", len(content), 0.0)
            for each, content in sorted(self._files.items())
        )

    async def read_bytes(self, path: str) -> bytes:
        return self._files[path]


class ResultFiles:
    """The results in a directory of this user, by their keys. A result counts for `seconds`.

    Beyond 256 MiB the oldest are deleted. A file that cannot be read is ignored.
    """

    def __init__(self, directory: Path, seconds: float) -> None:
        """Raise BadRequest `out_unusable`."""
        self._directory = directory
        self._seconds = seconds
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.is_symlink():
                raise OSError(0, "it is a link")
        except OSError as error:
            raise BadRequest(
                f"results cannot be kept in {directory}: {error.strerror}", code="out_unusable"
            ) from error

    def get(self, key: str) -> StoredResult | None:
        path = self._directory / f"{key}.json"
        try:
            if time.time() - path.stat().st_mtime > self._seconds:
                path.unlink()
                return None
            return msgspec.json.decode(path.read_bytes(), type=StoredResult)
        except (OSError, msgspec.MsgspecError):
            return None

    def put(self, key: str, result: StoredResult) -> None:
        """Keep a result, unless the disk does not take it."""
        path = self._directory / f"{key}.json"
        draft = self._directory / f"{key}.{secrets.token_hex(4)}.draft"
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as to:
                to.write(msgspec.json.encode(result))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
        self._prune()

    def clear(self) -> None:
        for path, _ in self._kept():
            path.unlink(missing_ok=True)

    def _prune(self) -> None:
        total = 0
        for path, status in sorted(self._kept(), key=lambda each: -each[1].st_mtime):
            total += status.st_size
            if total > _CACHE_MAX:
                path.unlink(missing_ok=True)

    def _kept(self) -> list[tuple[Path, os.stat_result]]:
        kept = []
        for path in self._directory.iterdir():
            if path.suffix in (".json", ".draft"):
                with suppress(OSError):  # another command deleted it
                    kept.append((path, path.lstat()))
        return kept
