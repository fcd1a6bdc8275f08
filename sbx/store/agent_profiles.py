"""The profiles of agents. No version is changed. Those that a conversation began with stay, and of
the others the last few."""

import sqlite3
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import astuple, replace

from sbx.store import Store


class ProfileRow(Struct, frozen=True):
    """One version. `owner` is empty for a file of the operator; `body` is JSON."""

    id: str
    owner: str
    agent_id: str
    version: int
    body: str
    created_at: float
    deleted: int = 0


_ROW = ", ".join(ProfileRow.__struct_fields__)
_UNUSED_KEPT = 10  # a conversation that begins now has not noted its version yet
Check = Callable[[ProfileRow | None], object]


async def put(store: Store, row: ProfileRow, check: Check = lambda _: None) -> ProfileRow:
    """Add the next version of a profile, unless the last one has the same body. Return the last
    version. `check` gets the last one before, and may raise."""

    def act(on: sqlite3.Connection) -> ProfileRow:
        last = _last(on, row.owner, row.agent_id)
        check(None if last is None or last.deleted else last)
        if last is not None and not last.deleted and last.body == row.body:
            return last
        new = replace(row, version=1 if last is None else last.version + 1)
        on.execute(
            f"INSERT INTO agent_profiles ({_ROW}) VALUES (?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
            astuple(new),
        )
        _forget_unused(on, row.owner, row.agent_id, new.version - _UNUSED_KEPT)
        return new

    return await store.write(act)


async def last(store: Store, owner: str, agent_id: str) -> ProfileRow | None:
    row = await store.read(lambda on: _last(on, owner, agent_id))
    return None if row is None or row.deleted else row


async def get(store: Store, profile_id: str) -> ProfileRow | None:
    row = await store.row(f"SELECT {_ROW} FROM agent_profiles WHERE id = ?", profile_id)  # noqa: S608
    return None if row is None else ProfileRow(*row)


async def list_for_owner(store: Store, owner: str) -> list[ProfileRow]:
    """Return the last version of each profile, by the names of the agents."""
    rows = await store.rows(
        f"SELECT {_ROW} FROM agent_profiles AS p WHERE owner = ? AND NOT deleted"  # noqa: S608
        " AND version = (SELECT max(version) FROM agent_profiles"
        "   WHERE owner = p.owner AND agent_id = p.agent_id) ORDER BY agent_id",
        owner,
    )
    return [ProfileRow(*row) for row in rows]


async def delete(store: Store, owner: str, agent_id: str) -> None:
    """Delete a profile for new conversations; a second time does nothing."""

    def act(on: sqlite3.Connection) -> None:
        if (last := _last(on, owner, agent_id)) is not None:
            _forget_unused(on, owner, agent_id, last.version)
        on.execute(
            "UPDATE agent_profiles SET deleted = 1 WHERE owner = ? AND agent_id = ?",
            (owner, agent_id),
        )

    await store.write(act)


def _forget_unused(on: sqlite3.Connection, owner: str, agent_id: str, version: int) -> None:
    """Forget the versions up to this one that no conversation began with."""
    on.execute(
        "DELETE FROM agent_profiles WHERE owner = ? AND agent_id = ? AND version <= ? AND id NOT IN"
        " (SELECT profile_id FROM chats WHERE profile_id IS NOT NULL)",
        (owner, agent_id, version),
    )


def _last(on: sqlite3.Connection, owner: str, agent_id: str) -> ProfileRow | None:
    row = on.execute(
        f"SELECT {_ROW} FROM agent_profiles WHERE owner = ? AND agent_id = ?"  # noqa: S608
        " ORDER BY version DESC LIMIT 1",
        (owner, agent_id),
    ).fetchone()
    return None if row is None else ProfileRow(*row)
