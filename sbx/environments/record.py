"""The record of an environment: written once, at the end of its creation."""

from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1
ALGORITHM = "sha256"


class Package(msgspec.Struct, frozen=True):
    name: str
    version: str


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`environment.json`.

    `executable` and `prefixes` are visible in a sandbox. `base` is the Python of the virtual
    environment. `digest` is the hash of `files.json`, `lock` that of `requirements.lock`, both by
    `algorithm`. `bytes` and `files` count the content of `venv/`.
    """

    format: int
    name: str
    made_at: str
    python: str
    base: str
    executable: str
    prefixes: tuple[str, ...]
    installer: str
    requirements: tuple[str, ...]
    packages: tuple[Package, ...]
    algorithm: str
    digest: str
    lock: str
    files: int
    bytes: int


class Environment(msgspec.Struct, frozen=True):
    """A complete environment. `path` is its directory on the host."""

    path: Path
    record: EnvironmentRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def venv(self) -> Path:
        return self.path / "venv"

    @property
    def lock_path(self) -> Path:
        return self.path / "requirements.lock"

    def to_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = msgspec.to_builtins(self.record)
        del record["format"]
        return {**record, "path": str(self.path), "lock_path": str(self.lock_path)}
