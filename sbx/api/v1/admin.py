"""For the operator: keys, the tokens, users and sandboxes of all owners, and mounts. For an owner:
its tokens and users.

A mount is a directory of the host inside a live sandbox. It is for the operator, because it names a
path of this host. The setting `mount_dirs` lists the allowed directories.
"""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field, StringConstraints

from sbx.api.auth import OperatorDep, OwnerDep, ServiceDep
from sbx.api.bodies import REVOKED, RequestBody, revoked
from sbx.api.errors import documented, iso
from sbx.api.v1.bay.models import Limit, SandboxResponse, Time, iso_or_none
from sbx.api.v1.bay.sandboxes import shown
from sbx.errors import Denied, NotFound
from sbx.protocol.mounts import Mount
from sbx.service.auth import TOKEN_TTL_MAX_S, KeyRecord, TokenRecord
from sbx.service.caller import Caller
from sbx.service.ids import check_id
from sbx.service.lifecycle import State

router = APIRouter(prefix="/v1/admin", tags=["operator"])
_ERRORS = documented(404, 409)
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
UserName = Annotated[str, Path(max_length=400)]
MountTarget = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_MOUNTS = "/sandboxes/{sandbox_id}/mounts"


class NewMount(RequestBody):
    """`source` is a directory of the service's host, by its absolute path. `target` is
    `/mnt/NAME`, or `/workspace/shared/NAME` to write to it; null: `/mnt` and the name of the
    directory."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=4095)]
    target: MountTarget | None = None
    read_only: bool = True


class MountList(BaseModel):
    items: list[Mount]


class NewKey(RequestBody):
    owner: Name
    name: Name | None = None
    operator: bool = False


class Unfrozen(BaseModel):
    """False: it was not frozen."""

    unfrozen: bool


class KeyBody(BaseModel):
    """A key without its text."""

    id: str
    owner: str
    name: str | None
    operator: bool
    created_at: Time
    last_used_at: Time | None
    revoked_at: Time | None


class CreatedKey(KeyBody):
    """`key` is the clear text, which only this reply has."""

    key: str


class KeyList(BaseModel):
    items: list[KeyBody]


class NewToken(RequestBody):
    """`ttl_s` in seconds; `owner` null: the caller's own."""

    owner: Name | None = None
    user_id: Name
    agent_id: Name | None = None
    conversation_id: Name | None = None
    scopes: list[str] | None = Field(None, max_length=16)
    ttl_s: float = Field(3600, gt=0, le=TOKEN_TTL_MAX_S, allow_inf_nan=False)


class TokenBody(BaseModel):
    """A token without its text."""

    id: str
    owner: str
    user_id: str
    agent_id: str | None
    conversation_id: str | None
    scopes: list[str] | None
    created_at: Time
    expires_at: Time
    revoked_at: Time | None


class CreatedToken(TokenBody):
    """`token` is the clear text, which only this reply has."""

    token: str


class TokenList(BaseModel):
    items: list[TokenBody]


class ForgottenUser(BaseModel):
    """`removed`: the number of each kind."""

    user_id: str
    owner: str
    removed: dict[str, int]


class OwnedSandbox(SandboxResponse):
    owner: str


class OwnedSandboxList(BaseModel):
    items: list[OwnedSandbox]
    next_cursor: str | None


def _own(caller: Caller, owner: str | None) -> str:
    """Return the named owner. Raise Denied `forbidden` for another one, except to an operator."""
    if owner not in (None, caller.owner) and not caller.operator:
        raise Denied(
            "a key may manage the users and tokens of its owner, and these are of another",
            code="forbidden",
            hint="leave owner out, or call as an operator",
        )
    return owner or caller.owner


@router.get("/keys", responses=_ERRORS)
async def keys(caller: OperatorDep, service: ServiceDep) -> KeyList:
    """List every key, including revoked ones."""
    return KeyList(items=[KeyBody(**_key(key)) for key in await service.access.keys()])


@router.post("/keys", status_code=201, responses=_ERRORS)
async def make_key(new: NewKey, caller: OperatorDep, service: ServiceDep) -> CreatedKey:
    """Create a key of an owner."""
    key, text = await service.access.make_key(new.owner, new.name, operator=new.operator)
    await service.recording.record(
        caller, "key.create", key.id, owner=key.owner, operator=key.operator
    )
    return CreatedKey(**_key(key), key=text)


@router.delete("/keys/{key_id}", status_code=204, responses={**_ERRORS, **REVOKED})
async def revoke_key(key_id: str, caller: OperatorDep, service: ServiceDep) -> Response:
    """Revoke it. From now on it is invalid."""
    recorded = await service.access.revoke_key(key_id)
    await service.recording.record(caller, "key.revoke", key_id)
    return revoked(recorded)


@router.get("/tokens", responses=_ERRORS)
async def tokens(
    caller: OwnerDep, service: ServiceDep, owner: Annotated[str | None, Query()] = None
) -> TokenList:
    """List the tokens of the caller's owner; for an operator every token, or those of one owner."""
    tokens = await service.access.tokens(owner if caller.operator else _own(caller, owner))
    return TokenList(items=[TokenBody(**_token(token)) for token in tokens])


@router.post("/tokens", status_code=201, responses=_ERRORS)
async def make_token(new: NewToken, caller: OwnerDep, service: ServiceDep) -> CreatedToken:
    """Create a token for one user, and optionally one agent and one conversation. It ends with the
    key of the caller. An operator may name another owner."""
    token, text = await service.access.make_token(
        _own(caller, new.owner),
        user_id=new.user_id,
        agent_id=new.agent_id,
        conversation_id=new.conversation_id,
        scopes=new.scopes,
        ttl_s=new.ttl_s,
        via_id=caller.via_id,
    )
    await service.recording.record(
        caller,
        "token.create",
        token.id,
        owner=token.owner,
        user_id=token.user_id,
        agent_id=token.agent_id,
        conversation_id=token.conversation_id,
        scopes=None if token.scopes is None else sorted(token.scopes),
        expires_at=token.expires_at,
    )
    return CreatedToken(**_token(token), token=text)


@router.delete("/tokens/{token_id}", status_code=204, responses={**_ERRORS, **REVOKED})
async def revoke_token(token_id: str, caller: OwnerDep, service: ServiceDep) -> Response:
    """Revoke it. From now on it is invalid. An owner may revoke its own tokens."""
    if not caller.operator and token_id not in {
        token.id for token in await service.access.tokens(caller.owner)
    }:
        raise NotFound(f"token {token_id[:80]!r} does not exist")
    recorded = await service.access.revoke_token(token_id)
    await service.recording.record(caller, "token.revoke", token_id)
    return revoked(recorded)


@router.delete("/users/{user_id}", responses=_ERRORS)
async def forget_user(
    user_id: UserName,
    caller: OwnerDep,
    service: ServiceDep,
    owner: Annotated[str | None, Query()] = None,
) -> ForgottenUser:
    """Delete all data of a user of the caller's owner, or of another one for an operator: sessions
    with their files and histories, chats with their messages, approvals and rules, tasks, and
    tokens. Projects belong to their owner and stay. A second call finds nothing."""
    whose = _own(caller, owner)
    removed = await service.deletions.user(whose, check_id("user_id", user_id))
    await service.recording.record(caller, "user.forget", user_id, owner=whose, **removed)
    return ForgottenUser(user_id=user_id, owner=whose, removed=dict(removed))


@router.get("/sandboxes", responses=_ERRORS)
async def sandboxes(
    caller: OperatorDep,
    service: ServiceDep,
    limit: Limit = 50,
    cursor: str | None = None,
    status: str | None = None,
) -> OwnedSandboxList:
    """List the sandboxes of all owners, each with its owner."""
    state = State.named(status)
    page = await service.sandboxes.list(
        caller, limit=limit, cursor=cursor, state=state, all_owners=True
    )
    items = [OwnedSandbox(**dict(shown(view)), owner=view.owner) for view in page.items]
    return OwnedSandboxList(items=items, next_cursor=page.next_cursor)


@router.post("/sandboxes/{sandbox_id}/unfreeze", responses=_ERRORS)
async def unfreeze(sandbox_id: str, caller: OperatorDep, service: ServiceDep) -> Unfrozen:
    """Unfreeze a sandbox that used a planted credential, so that kernels may start again."""
    unfrozen = service.sandboxes.index.get_as_operator(caller, sandbox_id).unfreeze()
    if unfrozen:
        await service.recording.record(caller, "sandbox.unfreeze", sandbox_id)
    return Unfrozen(unfrozen=unfrozen)


def _key(key: KeyRecord) -> dict[str, Any]:
    return {
        "id": key.id,
        "owner": key.owner,
        "name": key.name,
        "operator": key.operator,
        "created_at": iso(key.created_at),
        "last_used_at": iso_or_none(key.last_used_at),
        "revoked_at": iso_or_none(key.revoked_at),
    }


def _token(token: TokenRecord) -> dict[str, Any]:
    scopes = None if token.scopes is None else sorted(token.scopes)
    return {
        "id": token.id,
        "owner": token.owner,
        "user_id": token.user_id,
        "agent_id": token.agent_id,
        "conversation_id": token.conversation_id,
        "scopes": scopes,
        "created_at": iso(token.created_at),
        "expires_at": iso(token.expires_at),
        "revoked_at": iso_or_none(token.revoked_at),
    }


@router.get(_MOUNTS, responses=_ERRORS)
async def mounts(sandbox_id: str, caller: OperatorDep, service: ServiceDep) -> MountList:
    """List the mounts by the path inside. No kernel starts."""
    sandbox = service.sandboxes.index.get_as_operator(caller, sandbox_id)
    return MountList(items=list(sandbox.mounted))


@router.post(_MOUNTS, status_code=201, responses=_ERRORS)
async def mount(sandbox_id: str, new: NewMount, caller: OperatorDep, service: ServiceDep) -> Mount:
    """Mount a directory into every live and later kernel of the sandbox, until it is unmounted, the
    sandbox is deleted, or the service ends."""
    sandbox = service.sandboxes.index.get_as_operator(caller, sandbox_id)
    mount = await sandbox.mount(new.source, new.target, read_only=new.read_only)
    await service.recording.record(caller, "sandbox.mount", sandbox_id, **asdict(mount))
    return mount


@router.delete(_MOUNTS, status_code=204, responses=_ERRORS)
async def unmount(
    sandbox_id: str,
    target: Annotated[MountTarget, Query()],
    caller: OperatorDep,
    service: ServiceDep,
) -> None:
    """Unmount a directory. Its open files stay open."""
    await service.sandboxes.index.get_as_operator(caller, sandbox_id).unmount(target)
    await service.recording.record(caller, "sandbox.unmount", sandbox_id, target=target)
