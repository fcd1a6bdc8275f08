"""The profiles of agents: files of the operator, and those that owners have stored.

A profile belongs to an agent id. A file `{agent_id}.toml` in the directory of the operator counts
for all owners, and before a stored profile of the same agent.
"""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from sbx.agent.profile import AgentProfile, profile_files, read_profile
from sbx.aio import Clock
from sbx.errors import BadRequest, Conflict, NotFound, SbxError, Unavailable
from sbx.service.ids import check_id
from sbx.store import Store, agent_profiles
from sbx.store.agent_profiles import ProfileRow

_PER_OWNER = 200
_OF_FILES = ""  # the owner of profiles in files


class StoredProfile(Struct, frozen=True):
    """One version of a profile. `id` is None and `version` 0 for a file that no conversation has
    used as it is now."""

    id: str | None
    agent_id: str
    version: int
    profile: AgentProfile
    is_file: bool
    created_at: float | None


class BrokenProfile(Struct, frozen=True):
    """A file that is not a valid profile. Conversations with its agent do not begin."""

    agent_id: str
    error: SbxError


class AgentProfiles:
    """`directory`: that of the operator's files, which need not exist."""

    def __init__(self, store: Store, clock: Clock, directory: Path) -> None:
        self._store = store
        self._clock = clock
        self._directory = directory

    async def list_for(self, owner: str) -> Sequence[StoredProfile | BrokenProfile]:
        """Return the profiles of files and those of an owner, by the ids of their agents."""
        names = await asyncio.to_thread(profile_files, self._directory)
        profiles: dict[str, StoredProfile | BrokenProfile] = {}
        for row in await agent_profiles.list_for_owner(self._store, owner):
            profiles[row.agent_id] = _stored(row)
        for name in names:
            try:
                profiles[name] = await self._of_file(name)
            except SbxError as error:
                profiles[name] = BrokenProfile(name, error)
        return [profiles[name] for name in sorted(profiles)]

    async def find(self, owner: str, agent_id: str) -> StoredProfile | None:
        """Return the current profile of an agent. Raise Unavailable `invalid_profile` for a file
        that is not valid: an agent without its limits must not run."""
        if agent_id in await asyncio.to_thread(profile_files, self._directory):
            return await self._of_file(agent_id)
        row = await agent_profiles.last(self._store, owner, agent_id)
        return None if row is None else _stored(row)

    async def get(self, owner: str, agent_id: str) -> StoredProfile:
        """Raise NotFound `agent_not_found`, and Unavailable as `find`."""
        if (current := await self.find(owner, agent_id)) is None:
            raise no_profile(agent_id)
        return current

    async def version_for_chat(self, owner: str, agent_id: str) -> str | None:
        """Return the id of the current version, for a new conversation; None without a profile.
        The version of a file is stored now. Raise as `find`."""
        current = await self.find(owner, agent_id)
        if current is None or current.id is not None:
            return None if current is None else current.id
        row = await agent_profiles.put(self._store, self._row(_OF_FILES, agent_id, current.profile))
        return row.id

    async def of_chat(self, profile_id: str | None) -> StoredProfile | None:
        """Return the version that a conversation began with."""
        row = None if profile_id is None else await agent_profiles.get(self._store, profile_id)
        return None if row is None else _stored(row)

    async def add(self, owner: str, agent_id: str, profile: AgentProfile) -> StoredProfile:
        """Raise Conflict `agent_exists`, Unavailable `too_many_agents`, BadRequest for the id."""
        check_id("agent_id", agent_id)
        await self._check_no_file(agent_id, "agent_exists")
        if len(await agent_profiles.list_for_owner(self._store, owner)) >= _PER_OWNER:
            raise Unavailable(
                f"there are {_PER_OWNER} profiles of agents, which is the limit",
                code="too_many_agents",
                hint="delete some that are no longer needed",
                details={"limit": _PER_OWNER},
            )

        def check(last: ProfileRow | None) -> None:
            if last is not None:
                raise _exists(agent_id, "agent_exists", "change it with PUT")

        row = self._row(owner, agent_id, profile)
        return _stored(await agent_profiles.put(self._store, row, check))

    async def replace(self, owner: str, agent_id: str, profile: AgentProfile) -> StoredProfile:
        """Add a version, unless the profile is the same. Raise NotFound, Conflict
        `agent_is_file`."""
        await self._check_no_file(agent_id, "agent_is_file")

        def check(last: ProfileRow | None) -> None:
            if last is None:
                raise no_profile(agent_id)

        row = self._row(owner, agent_id, profile)
        return _stored(await agent_profiles.put(self._store, row, check))

    async def delete(self, owner: str, agent_id: str) -> None:
        """Delete the profile of an agent; a second time does nothing. Conversations keep their
        version. Raise Conflict `agent_is_file`."""
        await self._check_no_file(agent_id, "agent_is_file")
        await agent_profiles.delete(self._store, owner, agent_id)

    async def _check_no_file(self, agent_id: str, code: str) -> None:
        if agent_id in await asyncio.to_thread(profile_files, self._directory):
            raise _exists(agent_id, code, "a file of the operator has it")

    async def _of_file(self, agent_id: str) -> StoredProfile:
        try:
            profile = await asyncio.to_thread(read_profile, self._directory / f"{agent_id}.toml")
        except BadRequest as error:  # of the operator, and of no caller
            hint = "the operator corrects it: sbx agent check shows every problem"
            raise Unavailable(
                error.message, code="invalid_profile", hint=hint, details=error.details
            ) from None
        row = await agent_profiles.last(self._store, _OF_FILES, agent_id)
        if row is not None and row.body == _body(profile):
            return _stored(row)
        return StoredProfile(None, agent_id, 0 if row is None else row.version, profile, True, None)

    def _row(self, owner: str, agent_id: str, profile: AgentProfile) -> ProfileRow:
        name = f"profile-{secrets.token_hex(8)}"
        return ProfileRow(name, owner, agent_id, 1, _body(profile), self._clock.now())


def _body(profile: AgentProfile) -> str:
    return profile.model_dump_json(exclude_defaults=True)


def _stored(row: ProfileRow) -> StoredProfile:
    profile = AgentProfile.model_validate_json(row.body)
    is_file = row.owner == _OF_FILES
    return StoredProfile(row.id, row.agent_id, row.version, profile, is_file, row.created_at)


def no_profile(agent_id: str) -> NotFound:
    return NotFound(
        f"the agent {agent_id[:80]!r} has no profile",
        code="agent_not_found",
        hint="GET /api/v1/agents lists the profiles",
    )


def _exists(agent_id: str, code: str, hint: str) -> Conflict:
    message = f"the agent {agent_id[:80]!r} has a profile"
    return Conflict(message, code=code, hint=hint, details={"agent_id": agent_id[:400]})
