"""Who calls: keys, tokens and peers over a real store; every way in which a bearer is no good."""

# ruff: noqa: ASYNC240  # a look at a file blocks nothing that matters to a test

import base64
import hashlib
import hmac
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from sbx.errors import BadRequest, Denied, NotFound, Unavailable
from sbx.service import auth as module
from sbx.service.auth import SCOPES, Authenticator
from sbx.service.caller import Caller
from sbx.store import Store, keys
from tests.fake_clock import FakeClock

SERVICE = 4711


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with await Store.open(tmp_path / "sbx.db") as store:
        yield store


@pytest.fixture
def access(store: Store, clock: FakeClock, tmp_path: Path) -> Authenticator:
    return Authenticator(store, clock, tmp_path / "secret", SERVICE)


async def refused(access: Authenticator, bearer: str) -> None:
    with pytest.raises(Denied) as denied:
        await access.from_bearer(bearer)
    assert denied.value.code == "unauthorized"
    assert denied.value.details == {}
    assert len(bearer) < 5 or bearer not in str(denied.value.to_dict())


# -- peers -----------------------------------------------------------------------------------------


def test_a_peer_is_its_uid_and_the_service_and_root_are_operators(access: Authenticator) -> None:
    assert access.from_peer(7) == Caller("uid:7", "peer")
    assert access.from_peer(SERVICE) == Caller(f"uid:{SERVICE}", "peer", operator=True)
    assert access.from_peer(0).operator


def test_a_uid_that_several_users_share_is_no_peer(
    store: Store, clock: FakeClock, tmp_path: Path
) -> None:
    access = Authenticator(store, clock, tmp_path / "secret", SERVICE, shared_uid=65534)
    with pytest.raises(Denied) as denied:
        access.from_peer(65534)
    assert denied.value.code == "unauthorized"
    assert access.from_peer(7).owner == "uid:7"
    nobody = Authenticator(store, clock, tmp_path / "secret", 65534, shared_uid=65534)
    assert nobody.service_caller().operator


# -- keys ------------------------------------------------------------------------------------------


async def test_a_key_speaks_for_its_owner(access: Authenticator) -> None:
    key, text = await access.make_key("alice", "laptop")
    assert len(text) == len("sk-sbx-") + 64
    assert await access.keys() == [key]
    assert await access.from_bearer(text) == Caller("alice", "key")
    _, operator = await access.make_key("root", operator=True)
    assert (await access.from_bearer(operator)).operator


async def test_a_key_is_not_in_the_store(
    access: Authenticator, store: Store, tmp_path: Path
) -> None:
    _, text = await access.make_key("alice")
    _, token = await access.make_token("alice", user_id="u", ttl_s=60)
    kept = b"".join(item.read_bytes() for item in tmp_path.glob("sbx.db*"))
    assert hashlib.sha256(text.encode()).hexdigest().encode() in kept
    for secret in (text, text.removeprefix("sk-sbx-"), token, token.split(".")[2]):
        assert secret.encode() not in kept


@pytest.mark.parametrize(
    "bearer",
    ["", "x", "sk-sbx-" + "0" * 64, "a.b.c", "..", "\ud800", "\0", "ä" * 100, "x" * 100_000],
)
async def test_what_is_no_key_is_refused(access: Authenticator, bearer: str) -> None:
    await access.make_key("alice")
    await refused(access, bearer)


async def test_a_key_is_compared_whole(access: Authenticator) -> None:
    _, text = await access.make_key("alice")
    for wrong in (text[:-1], text + "0", text.upper(), f" {text}", f"{text}\n"):
        await refused(access, wrong)


async def test_a_hash_from_a_stolen_store_is_no_key(access: Authenticator) -> None:
    _, text = await access.make_key("alice")
    await refused(access, hashlib.sha256(text.encode()).hexdigest())


async def test_a_revoked_key_ends_at_once_though_it_was_used_before(
    access: Authenticator, store: Store
) -> None:
    key, text = await access.make_key("alice")
    _, other = await access.make_key("alice")
    for used in (text, other):  # the store has that by the time of the revocation
        await access.from_bearer(used)
    assert await access.revoke_key(key.id)
    await refused(access, text)
    assert await access.from_bearer(other)
    await store.settled()  # the use of a key is written later
    revoked = await access.keys()
    assert await access.revoke_key(key.id)
    assert await access.keys() == revoked
    with pytest.raises(NotFound):
        await access.revoke_key("key-none")


async def test_a_key_revoked_while_it_is_looked_up_is_not_remembered(
    access: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, text = await access.make_key("alice")
    found = keys.get

    async def slowly(store: Store, key_id: str) -> Any:
        record = await found(store, key_id)
        monkeypatch.undo()
        await access.revoke_key(key.id)
        return record

    monkeypatch.setattr(keys, "get", slowly)
    await access.from_bearer(text)
    await refused(access, text)


async def test_when_a_key_was_used_is_remembered_by_the_minute(
    access: Authenticator, clock: FakeClock
) -> None:
    _, text = await access.make_key("alice")
    assert (await access.keys())[0].last_used_at is None
    first = clock.now()
    await access.from_bearer(text)
    await access.make_key("flush")
    assert (await access.keys())[0].last_used_at == first
    clock.advance(30)
    await access.from_bearer(text)
    clock.advance(40)
    await access.from_bearer(text)
    await access.make_key("flush")
    assert (await access.keys())[0].last_used_at == first + 70


async def test_a_known_bearer_is_not_looked_up_again_for_a_moment(
    access: Authenticator, store: Store, clock: FakeClock
) -> None:
    _, text = await access.make_key("alice")
    await access.from_bearer(text)
    await store.write(lambda on: on.execute("DELETE FROM keys"))
    assert await access.from_bearer(text)
    clock.advance(10)
    await refused(access, text)


async def test_what_is_remembered_is_bounded(
    store: Store, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CACHED_MAX", 3)
    access = Authenticator(store, clock, tmp_path / "secret", SERVICE)
    texts = [(await access.make_key(f"owner{n}"))[1] for n in range(6)]
    for _ in range(2):
        assert [(await access.from_bearer(text)).owner for text in texts] == [
            f"owner{n}" for n in range(6)
        ]
    assert len(access._known) == 3


@pytest.mark.parametrize("owner", ["", "x" * 129, "a\nb", "\u202eabc", "\ud800"])
async def test_an_owner_is_a_printable_name(access: Authenticator, owner: str) -> None:
    with pytest.raises(BadRequest):
        await access.make_key(owner)
    with pytest.raises(BadRequest):
        await access.make_token(owner, user_id="u", ttl_s=1)


# -- the first key ---------------------------------------------------------------------------------


async def test_the_first_key_is_made_once_and_kept_for_its_user_alone(
    access: Authenticator, tmp_path: Path
) -> None:
    kept = tmp_path / "config" / "credentials.json"
    text = await access.first_key(None, kept)
    assert text is not None
    assert await access.from_bearer(text) == Caller("default", "key", operator=True)
    assert json.loads(kept.read_text())["api_key"] == text
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert await access.first_key(None, kept) is None
    assert [item.name for item in kept.parent.iterdir()] == ["credentials.json"]


async def test_no_first_key_comes_back_after_all_were_revoked(
    access: Authenticator, tmp_path: Path
) -> None:
    key, _ = await access.make_key("alice")
    await access.revoke_key(key.id)
    assert await access.first_key(None, tmp_path / "c.json") is None


async def test_credentials_do_not_follow_a_link(access: Authenticator, tmp_path: Path) -> None:
    kept = tmp_path / "credentials.json"
    (tmp_path / "victim").write_text("precious")
    kept.symlink_to(tmp_path / "victim")
    await access.first_key(None, kept)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not kept.is_symlink()


async def test_no_first_key_is_made_where_it_cannot_be_kept(
    access: Authenticator, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable) as unusable:
        await access.first_key(None, tmp_path / "file" / "credentials.json")
    assert unusable.value.code == "secret_unusable"
    assert await access.keys() == []
    assert await access.first_key(None, tmp_path / "credentials.json")


async def test_a_given_key_of_any_text_is_the_operators(
    access: Authenticator, tmp_path: Path
) -> None:
    kept = tmp_path / "c.json"
    for _ in range(2):  # each start gives it again
        assert await access.first_key("sk-bay-of-mine", kept) is None
    assert await access.from_bearer("sk-bay-of-mine") == Caller("default", "key", operator=True)
    assert not kept.exists()
    assert len(await access.keys()) == 1


async def test_a_given_key_replaces_the_one_given_before(
    access: Authenticator, tmp_path: Path
) -> None:
    _, made = await access.make_key("alice")
    await access.first_key("the-old-key-of-the-operator", tmp_path / "c")
    await access.first_key("the-new-key-of-the-operator", tmp_path / "c")
    await refused(access, "the-old-key-of-the-operator")
    assert await access.from_bearer("the-new-key-of-the-operator")
    assert await access.from_bearer(made)


async def test_a_given_key_that_was_revoked_stays_so(
    access: Authenticator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await access.first_key("the-key-of-the-operator", tmp_path / "c")
    await access.revoke_key((await access.keys())[0].id)
    await access.first_key("the-key-of-the-operator", tmp_path / "c")
    await refused(access, "the-key-of-the-operator")
    assert "revoked" in caplog.text
    assert "the-key" not in caplog.text


@pytest.mark.parametrize("given", ["a\nb", " x", "x" * 5000])
async def test_a_given_key_that_no_header_could_carry_is_refused(
    access: Authenticator, tmp_path: Path, given: str
) -> None:
    with pytest.raises(BadRequest) as wrong:
        await access.first_key(given, tmp_path / "c")
    assert given not in wrong.value.message


# -- tokens ----------------------------------------------------------------------------------------


async def test_a_token_reaches_within_its_bounds(access: Authenticator) -> None:
    _, text = await access.make_token(
        "alice", user_id="u", agent_id="a", conversation_id="c", scopes=["execute"], ttl_s=60
    )
    caller = await access.from_bearer(text)
    assert caller == Caller(
        "alice",
        "token",
        scopes=frozenset({"execute"}),
        user_id="u",
        agent_id="a",
        conversation_id="c",
    )
    assert caller.may("execute")
    assert not caller.may("files:read")
    assert not caller.operator


async def test_a_token_may_name_any_id_that_a_session_may(access: Authenticator) -> None:
    hebrew = "\u200f\u05d0 \u202e b"
    _, text = await access.make_token("alice", user_id=hebrew, ttl_s=60)
    assert (await access.from_bearer(text)).user_id == hebrew


async def test_a_token_may_read_its_own_bounds(access: Authenticator) -> None:
    _, text = await access.make_token("alice", user_id="u", scopes=["execute"], ttl_s=60)
    claims = jwt.decode(text, options={"verify_signature": False})
    assert (claims["user_id"], claims["scopes"], claims["sub"]) == ("u", ["execute"], "alice")
    assert "agent_id" not in claims


async def test_a_token_ends_at_its_time_though_it_was_used_just_before(
    access: Authenticator, clock: FakeClock
) -> None:
    _, text = await access.make_token("alice", user_id="u", ttl_s=60)
    clock.advance(59.5)
    await access.from_bearer(text)
    clock.advance(0.5)
    await refused(access, text)


async def test_a_revoked_token_ends_at_once(access: Authenticator) -> None:
    token, text = await access.make_token("alice", user_id="u", ttl_s=60)
    await access.from_bearer(text)
    await access.revoke_token(token.id)
    await refused(access, text)
    assert (await access.tokens())[0].revoked_at is not None
    with pytest.raises(NotFound):
        await access.revoke_token("tok-none")


async def test_tokens_are_listed_by_owner(access: Authenticator) -> None:
    alices, _ = await access.make_token("alice", user_id="u", ttl_s=60)
    bobs, _ = await access.make_token("bob", user_id="u", scopes=SCOPES, ttl_s=60)
    assert await access.tokens("alice") == [alices]
    assert await access.tokens() == [alices, bobs]
    assert bobs.scopes == frozenset(SCOPES)


async def test_tokens_hold_over_a_restart(
    access: Authenticator, store: Store, clock: FakeClock, tmp_path: Path
) -> None:
    _, text = await access.make_token("alice", user_id="u", ttl_s=60)
    again = Authenticator(store, clock, tmp_path / "secret", SERVICE)
    assert (await again.from_bearer(text)).user_id == "u"


async def test_a_token_of_another_installation_is_refused(
    access: Authenticator, store: Store, clock: FakeClock, tmp_path: Path
) -> None:
    foreign = Authenticator(store, clock, tmp_path / "other-secret", SERVICE)
    _, text = await foreign.make_token("alice", user_id="u", ttl_s=60)
    await refused(access, text)


async def test_a_token_that_the_store_does_not_know_is_refused(
    access: Authenticator, store: Store
) -> None:
    _, text = await access.make_token("alice", user_id="u", ttl_s=60)
    await store.write(lambda on: on.execute("DELETE FROM tokens"))
    await refused(access, text)


def forged(secret: bytes, header: dict[str, Any], claims: dict[str, Any]) -> str:
    """A token made by hand, as a library would not make it."""

    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    signed = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims).encode())}"
    name = {"HS384": "sha384", "HS512": "sha512"}.get(header.get("alg", ""), "sha256")
    if header.get("alg") in ("none", "None", "NONE"):
        return f"{signed}."
    return f"{signed}.{part(hmac.digest(secret, signed.encode(), name))}"


HEADERS: dict[str, dict[str, Any]] = {
    "unsigned": {"alg": "none", "typ": "JWT"},
    "unsigned, shouted": {"alg": "NONE", "typ": "JWT"},
    "another algorithm": {"alg": "HS512", "typ": "JWT"},
    "a weaker name": {"alg": "hs256"},
    "no algorithm": {"typ": "JWT"},
    "an asymmetric algorithm": {"alg": "RS256"},
    "critical": {"alg": "HS256", "crit": ["b64"], "b64": False},
    "a number": {"alg": 256},
}


@pytest.mark.parametrize("kind", HEADERS)
async def test_only_the_one_algorithm_is_believed(
    access: Authenticator, tmp_path: Path, kind: str
) -> None:
    _, text = await access.make_token("alice", user_id="u", ttl_s=60)
    claims = jwt.decode(text, options={"verify_signature": False})
    secret = (tmp_path / "secret").read_bytes().strip()
    assert await access.from_bearer(forged(secret, {"alg": "HS256", "typ": "JWT"}, claims))
    await refused(access, forged(secret, HEADERS[kind], claims))


CLAIMS: dict[str, dict[str, Any]] = {
    "audience": {"aud": "another"},
    "no audience": {"aud": None},
    "audiences without ours": {"aud": ["a", "b"]},
    "issuer": {"iss": "another"},
    "no issuer": {"iss": None},
    "another owner": {"sub": "bob"},
    "no owner": {"sub": None},
    "no id": {"jti": None},
    "an id of another kind": {"jti": 7},
    "an unknown id": {"jti": "tok-0"},
    "no end": {"exp": None},
    "an end that is past": {"exp": 1},
    "an end that is no number": {"exp": "soon"},
    "no beginning": {"iat": None},
}


@pytest.mark.parametrize("kind", CLAIMS)
async def test_a_signed_token_with_a_wrong_claim_is_refused(
    access: Authenticator, tmp_path: Path, kind: str
) -> None:
    """As a token made with our secret for something else would be."""
    _, text = await access.make_token("alice", user_id="u", ttl_s=60)
    claims = jwt.decode(text, options={"verify_signature": False}) | CLAIMS[kind]
    claims = {name: value for name, value in claims.items() if value is not None}
    secret = (tmp_path / "secret").read_bytes().strip()
    await refused(access, forged(secret, {"alg": "HS256"}, claims))


async def test_bounds_that_were_widened_by_hand_do_not_hold(
    access: Authenticator, tmp_path: Path
) -> None:
    """The store has the word, even against whoever could sign."""
    _, text = await access.make_token("alice", user_id="u", scopes=["execute"], ttl_s=60)
    claims = jwt.decode(text, options={"verify_signature": False})
    claims |= {"user_id": "victim", "scopes": None, "exp": 10**12}
    secret = (tmp_path / "secret").read_bytes().strip()
    caller = await access.from_bearer(forged(secret, {"alg": "HS256"}, claims))
    assert (caller.user_id, caller.scopes) == ("u", frozenset({"execute"}))


async def test_no_byte_of_a_token_can_be_changed(access: Authenticator) -> None:
    _, text = await access.make_token("alice", user_id="u", ttl_s=60)
    for at in [*range(0, len(text) - 1, 7), len(text) - 1]:
        await refused(access, text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])


async def test_another_text_of_the_same_signature_is_refused(access: Authenticator) -> None:
    """base64 takes padding and foreign characters, and ignores the last bits."""
    _, text = await access.make_token("alice", user_id="u", ttl_s=60)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    alike = alphabet[alphabet.index(text[-1]) | 3]
    others = {f"{text}=", f"{text}==", f"{text}\n", f"{text[:-1]}!{text[-1]}", text[:-1] + alike}
    for other in others - {text}:
        await refused(access, other)
    assert (await access.from_bearer(text)).owner == "alice"


@pytest.mark.parametrize(
    "wrong",
    [
        {"user_id": ""},
        {"user_id": "a/b"},
        {"user_id": ".."},
        {"agent_id": "x" * 129},
        {"conversation_id": "a\0"},
        {"scopes": ["files:read", "root"]},
        {"ttl_s": 0},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"ttl_s": 10**30},
    ],
    ids=str,
)
async def test_a_token_with_senseless_bounds_is_not_made(
    access: Authenticator, wrong: dict[str, Any]
) -> None:
    bounds: dict[str, Any] = {"user_id": "u", "ttl_s": 60} | wrong
    with pytest.raises(BadRequest):
        await access.make_token("alice", **bounds)
    assert await access.tokens() == []


# -- the secret ------------------------------------------------------------------------------------


async def test_the_secret_is_for_its_user_alone(access: Authenticator, tmp_path: Path) -> None:
    await access.make_token("alice", user_id="u", ttl_s=60)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert len((tmp_path / "secret").read_bytes().strip()) == 64


@pytest.mark.parametrize("kind", ["readable", "short", "empty", "link", "pipe", "directory"])
async def test_a_secret_that_is_none_is_refused(
    access: Authenticator, tmp_path: Path, kind: str
) -> None:
    secret = tmp_path / "secret"
    match kind:
        case "readable":
            secret.write_bytes(b"x" * 64)
            secret.chmod(0o640)
        case "short" | "empty":
            secret.write_bytes(b"x" * 8 if kind == "short" else b"")
            secret.chmod(0o600)
        case "link":
            (tmp_path / "real").write_bytes(b"x" * 64)
            secret.symlink_to(tmp_path / "real")
        case "pipe":
            os.mkfifo(secret, 0o600)
        case "directory":
            secret.mkdir(mode=0o700)
    with pytest.raises(Unavailable) as unusable:
        await access.make_token("alice", user_id="u", ttl_s=60)
    assert unusable.value.code == "secret_unusable"
    assert await access.tokens() == []
