"""The ship of a session and the sessions of a ship, in the labels of its sandbox.

{"surface": "shipyard", "max_session_num": n, "sessions": [name of a conversation, …]}
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any
from weakref import WeakValueDictionary

from fastapi import Depends, Header, Request
from msgspec.structs import replace

from sbx.api.errors import iso
from sbx.errors import Denied, NotFound
from sbx.service.caller import Caller
from sbx.service.leases import SandboxLease
from sbx.service.lifecycle import State
from sbx.service.models import SandboxView
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

SURFACE = "shipyard"


def session_name(session_id: str) -> str:
    """Return the name of the conversation of a session. Its id is any text, so it is hashed."""
    return (
        f"session-{hashlib.sha256(session_id.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"
    )


async def _session(x_session_id: Annotated[str, Header(min_length=1, max_length=4096)]) -> str:
    return session_name(x_session_id)


SessionName = Annotated[str, Depends(_session)]


class Ships:
    """The ships of a service. Two requests of one session at once get the same ship."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sandboxes = service.sandboxes
        self._choosing = asyncio.Lock()
        self._writing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def take(
        self,
        caller: Caller,
        session: str,
        *,
        policy: str,
        ttl_s: int,
        sessions_max: int,
        narrower: Mapping[str, Any],
    ) -> SandboxView:
        """Return the running ship of the session, else its expired one with the files, else a ship
        with a free place, else a new one. Raise as `Sandboxes.create`."""
        async with self._choosing:
            every = self.every(caller)
            running = [ship for ship in every if not ship.expired]
            if (ship := _with(session, running)) is not None:
                return await ship.view()
            if (ship := _with(session, every)) is not None:
                end = self._service.clock.now() + ttl_s
                row = replace(ship.row, expires_at=end, ttl_s=float(ttl_s))
                if await ship.restore(row, *await ship.policy()):
                    return await ship.view()
            if (ship := next(filter(_has_place, running), None)) is not None:
                await _join(ship, session)
                return await ship.view()
            labels = {
                "surface": SURFACE,
                "max_session_num": sessions_max,
                "sessions": [session],
            }
            view = await self._sandboxes.create(
                caller,
                policy=policy,
                narrower=narrower,
                ttl_s=ttl_s,
                labels=labels,
                slides=True,
            )
        await self._service.recording.record(caller, "sandbox.create", view.id, surface=SURFACE)
        return view

    def get(self, caller: Caller, ship_id: str) -> ServiceSandbox:
        """Raise NotFound for anything but a ship that the caller may see."""
        ship = self._sandboxes.index.find(caller, ship_id)
        if ship is None or not _is_ship(ship):
            raise NotFound(f"Ship {ship_id[:80]!r} does not exist")
        return ship

    def every(self, caller: Caller) -> list[ServiceSandbox]:
        """Return the ships that the caller may see, with the expired ones."""
        return [each for each in self._sandboxes.index.visible(caller) if _is_ship(each)]

    def check(self, caller: Caller, ship_id: str, session: str) -> ServiceSandbox:
        """Return the ship of a session. Raise NotFound for an unknown or expired one, and Denied
        for a session that has not joined it."""
        ship = self.get(caller, ship_id)
        if ship.expired:
            raise NotFound("Ship not found or not running")
        if session not in _sessions(ship):
            raise Denied("Session does not have access to this ship", code="forbidden")
        return ship

    @asynccontextmanager
    async def session(
        self, caller: Caller, ship_id: str, session: str, scope: str, *, frees: bool = False
    ) -> AsyncIterator[SandboxLease]:
        """Lease the ship for a session. Raise as `check`."""
        ship = self.check(caller, ship_id, session)
        async with self._sandboxes.using(
            caller, ship.id, scope=scope, frees=frees, conversation=session
        ) as use:
            yield use

    def writing(self, ship_id: str, session: str) -> asyncio.Lock:
        """Return the lock for changes that read a file first: two appends at once are both kept."""
        return self._writing.setdefault((ship_id, session), asyncio.Lock())


async def _ships(request: Request) -> Ships:
    state = request.app.state
    if not hasattr(state, "ships"):
        state.ships = Ships(state.service)
    ships: Ships = state.ships
    return ships


ShipsDep = Annotated[Ships, Depends(_ships)]


def shown(view: SandboxView, *, now: float) -> dict[str, Any]:
    """Return a ship as ShipInfo of the SDK."""
    labels = view.labels or {}
    return {
        "id": view.id,
        "status": int(view.state not in (State.EXPIRED, State.DELETED)),
        "created_at": iso(view.created_at),
        "updated_at": iso(now),
        "container_id": None,
        "ip_address": None,
        "ttl": int(view.ttl_s or 0),
        "max_session_num": labels["max_session_num"],
        "current_session_num": len(labels["sessions"]),
        "expires_at": None if view.expires_at is None else iso(view.expires_at),
    }


def _is_ship(sandbox: ServiceSandbox) -> bool:
    labels = sandbox.row.labels
    return labels is not None and labels.get("surface") == SURFACE


def _sessions(ship: ServiceSandbox) -> list[str]:
    assert ship.row.labels is not None
    sessions: list[str] = ship.row.labels["sessions"]
    return sessions


def _with(session: str, ships: list[ServiceSandbox]) -> ServiceSandbox | None:
    return next((ship for ship in ships if session in _sessions(ship)), None)


def _has_place(ship: ServiceSandbox) -> bool:
    assert ship.row.labels is not None
    return len(_sessions(ship)) < int(ship.row.labels["max_session_num"])


async def _join(ship: ServiceSandbox, session: str) -> None:
    assert ship.row.labels is not None
    await ship.set_labels({**ship.row.labels, "sessions": [*_sessions(ship), session]})
