"""Records of a service as values. Times are in seconds of the epoch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from sbx.client.errors import decode
from sbx.protocol.mounts import Mount
from sbx.protocol.pages import Page

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """The state of a sandbox at the time of the request. `policy` is the requested name; `status`
    is one of idle, starting, ready, failed, expired."""

    id: str
    status: str
    policy: str
    workspace_id: str
    capabilities: tuple[str, ...]
    created_at: float
    expires_at: float | None
    idle_expires_at: float | None


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a user with an agent; `status` is pending, running, stopped or error."""

    session_id: str
    status: str
    created_at: float
    ttl: float
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProjectInfo:
    """`working_directory` is a path on the host of the service. If the sandbox is disabled, tools
    act on that host itself. `in_use`: whether an agent works in it now. `ask_commands`: whether
    each command needs an approval before it runs."""

    id: str
    name: str
    working_directory: str
    sandbox_enabled: bool
    created_at: float
    conversations: int = 0
    in_use: bool = False
    ask_commands: bool = False


def sandbox_info(reply: Any) -> SandboxInfo:
    def read(data: Any) -> SandboxInfo:
        return SandboxInfo(
            id=data["id"],
            status=data["status"],
            policy=data["profile"],
            workspace_id=data["cargo_id"],
            capabilities=tuple(data["capabilities"]),
            created_at=seconds(data["created_at"]),
            expires_at=_maybe(data["expires_at"]),
            idle_expires_at=_maybe(data["idle_expires_at"]),
        )

    return decode("sandbox", read, reply)


def mount(reply: Any) -> Mount:
    return decode(
        "mount", lambda data: Mount(data["source"], data["target"], bool(data["read_only"])), reply
    )


def project(reply: Any) -> ProjectInfo:
    def read(data: Any) -> ProjectInfo:
        return ProjectInfo(
            data["id"],
            data["name"],
            data["working_directory"],
            bool(data["sandbox_enabled"]),
            float(data["created_at"]),
            int(data.get("conversations", 0)),
            bool(data.get("in_use", False)),
            bool(data.get("ask_commands", False)),
        )

    return decode("project", read, reply)


def session(reply: Any) -> Session:
    def read(data: Any) -> Session:
        info = data.get("info") or {}
        return Session(data["session_id"], data["status"], data["created_at"], data["ttl"], info)

    return decode("session", read, reply)


def page(reply: Any, read_item: Callable[[Any], T]) -> Page[T]:
    def read(data: Any) -> Page[T]:
        return Page(tuple(read_item(item) for item in data["items"]), data.get("next_cursor"))

    return decode("list", read, reply)


def seconds(text: str) -> float:
    """Convert a time in ISO 8601 to seconds of the epoch."""
    return datetime.fromisoformat(text).timestamp()


def _maybe(text: str | None) -> float | None:
    return None if text is None else seconds(text)
