"""What a service tells of what it keeps, as values. Times in seconds of the epoch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from sbx.errors import Broken
from sbx.protocol.mounts import Mount
from sbx.protocol.pages import Page

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as it was when the service was asked. `policy` is the name that was asked for;
    `status` one of idle, starting, ready, failed, expired."""

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
    """One user's session with one agent; `status` is pending, running, stopped or error."""

    session_id: str
    status: str
    created_at: float
    ttl: float
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProjectInfo:
    """`working_directory` is of the service's host; with the sandbox off, tools act on that host
    itself."""

    id: str
    name: str
    working_directory: str
    sandbox_enabled: bool
    created_at: float


def sandbox_info(told: Any) -> SandboxInfo:
    return _read(
        "a sandbox",
        lambda: SandboxInfo(
            id=told["id"],
            status=told["status"],
            policy=told["profile"],
            workspace_id=told["cargo_id"],
            capabilities=tuple(told["capabilities"]),
            created_at=seconds(told["created_at"]),
            expires_at=_maybe(told["expires_at"]),
            idle_expires_at=_maybe(told["idle_expires_at"]),
        ),
    )


def mount(told: Any) -> Mount:
    return _read(
        "a mount",
        lambda: Mount(told["source"], told["target"], bool(told["read_only"])),
    )


def project(told: Any) -> ProjectInfo:
    return _read(
        "a project",
        lambda: ProjectInfo(
            told["id"],
            told["name"],
            told["working_directory"],
            bool(told["sandbox_enabled"]),
            float(told["created_at"]),
        ),
    )


def session(told: Any) -> Session:
    return _read(
        "a session",
        lambda: Session(
            told["session_id"],
            told["status"],
            told["created_at"],
            told["ttl"],
            told.get("info") or {},
        ),
    )


def page(told: Any, item: Callable[[Any], T]) -> Page[T]:
    return _read(
        "a list",
        lambda: Page(tuple(item(one) for one in told["items"]), told.get("next_cursor")),
    )


def seconds(told: str) -> float:
    """ISO-8601 as seconds of the epoch."""
    return datetime.fromisoformat(told).timestamp()


def _maybe(told: str | None) -> float | None:
    return None if told is None else seconds(told)


def _read(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Broken(f"the service told of {what} that is none", code="foreign_reply") from error
