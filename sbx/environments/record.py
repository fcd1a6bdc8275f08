"""What is told of an environment: written once, when all of it is there."""

from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1
ALGORITHM = "sha256"


class Package(msgspec.Struct, frozen=True):
    """One that is installed there, as its metadata says."""

    name: str
    version: str


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`environment.json`.

    `executable` and `prefixes` are what a sandbox is shown, `base` the Python that it is made of.
    `digest` is that of `files.json`, `lock` that of `requirements.lock`, both by `algorithm`;
    `bytes` and `files` count what lies in `venv/`.
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
    """One that is whole. `path` is its directory on the host."""

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
        told: dict[str, Any] = msgspec.to_builtins(self.record)
        del told["format"]
        return {**told, "path": str(self.path), "lock_path": str(self.lock_path)}
