"""A call with an idempotency key is done once, at whatever moment its twin comes."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sbx.errors import Broken, Conflict, Unavailable
from sbx.service.caller import Caller
from sbx.service.idempotency import IdempotencyCache, Reply
from sbx.store import Store
from sbx.store.idempotency import Reservation, StoredReplies, began
from tests.fake_clock import FakeClock

ME = Caller("me", "key")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with await Store.open(tmp_path / "sbx.db") as store:
        yield store


@pytest.fixture
def replies(store: Store, clock: FakeClock) -> IdempotencyCache:
    return IdempotencyCache(store, clock, ttl_s=3600, wait_s=5)


class Work:
    """Counts how often it is done; goes on when the test says so."""

    def __init__(self, *statuses: int, held: bool = False) -> None:
        self.done = 0
        self.statuses = statuses or (201,)
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        if not held:
            self.go.set()

    async def __call__(self) -> Reply:
        self.done += 1
        mine = self.done
        self.begun.set()
        await self.go.wait()
        return self.statuses[min(mine, len(self.statuses)) - 1], b"reply %d" % mine


def failing(error: BaseException) -> Callable[[], Awaitable[Reply]]:
    async def work() -> Reply:
        raise error

    return work


async def kept(store: Store) -> int:
    row = await store.row("SELECT count(*) FROM idempotency")
    assert row is not None
    return int(row[0])


async def test_without_a_key_each_call_is_done(replies: IdempotencyCache, store: Store) -> None:
    work = Work()
    assert await replies.once(ME, None, "f", work) == (201, b"reply 1")
    assert await replies.once(ME, None, "f", work) == (201, b"reply 2")
    assert await kept(store) == 0


async def test_fifty_at_once_are_done_once(replies: IdempotencyCache) -> None:
    work = Work(held=True)
    calls = [asyncio.create_task(replies.once(ME, "k", "f", work)) for _ in range(50)]
    await work.begun.wait()
    work.go.set()
    assert set(await asyncio.gather(*calls)) == {(201, b"reply 1")}
    assert work.done == 1


async def test_a_reply_outlives_a_restart(store: Store, clock: FakeClock) -> None:
    await IdempotencyCache(store, clock).once(ME, "k", "f", Work())
    assert await IdempotencyCache(store, clock).once(ME, "k", "f", Work(500)) == (201, b"reply 1")


async def test_a_key_is_free_again_after_its_time(
    replies: IdempotencyCache, clock: FakeClock
) -> None:
    work = Work()
    await replies.once(ME, "k", "f", work)
    clock.advance(3600)
    assert await replies.once(ME, "k", "f", work) == (201, b"reply 1")
    clock.advance(1)
    assert await replies.once(ME, "k", "another", work) == (201, b"reply 2")


async def test_a_reply_of_a_call_that_took_longer_than_the_time_is_kept(
    replies: IdempotencyCache, store: Store, clock: FakeClock
) -> None:
    """Its reservation is forgotten meanwhile, and its reply once was with it."""
    work = Work(held=True)
    call = asyncio.create_task(replies.once(ME, "k", "f", work))
    await work.begun.wait()
    clock.advance(3601)
    await replies.once(ME, "other", "f", Work())
    assert await kept(store) == 1
    work.go.set()
    first = await call
    assert await replies.once(ME, "k", "f", work) == first
    assert work.done == 1
    assert await kept(store) == 2


async def test_old_replies_are_forgotten(
    replies: IdempotencyCache, store: Store, clock: FakeClock
) -> None:
    for number in range(5):
        await replies.once(ME, f"k{number}", "f", Work())
    clock.advance(3601)
    await replies.once(ME, "new", "f", Work())
    assert await kept(store) == 1


async def test_a_key_of_another_request_is_a_conflict(replies: IdempotencyCache) -> None:
    work = Work(held=True)
    first = asyncio.create_task(replies.once(ME, "k", "f", work))
    await work.begun.wait()
    for _ in ("while it goes on", "afterwards"):
        with pytest.raises(Conflict) as conflict:
            await replies.once(ME, "k", "another", work)
        assert conflict.value.code == "conflict"
        assert set(conflict.value.details) == {"key", "hint"}
        work.go.set()
        await first
    assert await replies.once(ME, "k", "f", work) == (201, b"reply 1")
    assert work.done == 1


async def test_a_wrong_request_does_not_disturb_a_replay_beside_it(
    replies: IdempotencyCache,
) -> None:
    """It once took the place of the kept call for a moment, and the replay got its conflict."""
    await replies.once(ME, "k", "f", Work())
    for wrong_first in (True, False):
        fingerprints = ["another", "f", "f"] if wrong_first else ["f", "another", "f"]
        got = await asyncio.gather(
            *(replies.once(ME, "k", fingerprint, Work()) for fingerprint in fingerprints),
            return_exceptions=True,
        )
        for fingerprint, reply in zip(fingerprints, got, strict=True):
            assert isinstance(reply, Conflict) == (fingerprint == "another")
            assert isinstance(reply, Conflict) or reply == (201, b"reply 1")


@pytest.mark.full_tier
@pytest.mark.parametrize("key", ["", "a b", "x" * 129, "é", "a\n", "../x", "\x00", "\ud800"])
async def test_a_malformed_key_is_a_conflict(replies: IdempotencyCache, key: str) -> None:
    work = Work()
    with pytest.raises(Conflict) as conflict:
        await replies.once(ME, key, "f", work)
    assert len(conflict.value.details["key"]) < 150
    assert work.done == 0


async def test_a_failure_is_given_and_the_key_is_free(
    replies: IdempotencyCache, store: Store
) -> None:
    work = Work(409, 201)
    assert (await replies.once(ME, "k", "f", work))[0] == 409
    with pytest.raises(Broken):
        await replies.once(ME, "k", "f", failing(Broken("x")))
    assert await replies.once(ME, "k", "g", work) == (201, b"reply 2")
    assert await kept(store) == 1


async def test_who_waited_for_a_failure_does_the_work_itself(replies: IdempotencyCache) -> None:
    work = Work(503, 503, 201, held=True)
    calls = [asyncio.create_task(replies.once(ME, "k", "f", work)) for _ in range(5)]
    await work.begun.wait()
    work.go.set()
    got = await asyncio.gather(*calls)
    assert [status for status, _ in got].count(503) == 2
    assert {reply for reply in got if reply[0] == 201} == {(201, b"reply 3")}
    assert work.done == 3


async def test_who_waited_for_one_that_was_cancelled_does_the_work_itself(
    replies: IdempotencyCache,
) -> None:
    work = Work(held=True)
    first = asyncio.create_task(replies.once(ME, "k", "f", work))
    await work.begun.wait()
    second = asyncio.create_task(replies.once(ME, "k", "f", work))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.go.set()
    assert await second == (201, b"reply 2")


async def test_waiting_for_the_first_has_an_end(store: Store, clock: FakeClock) -> None:
    replies = IdempotencyCache(store, clock, wait_s=0.05)
    work = Work(held=True)
    first = asyncio.create_task(replies.once(ME, "k", "f", work))
    await work.begun.wait()
    with pytest.raises(Conflict):
        await replies.once(ME, "k", "f", work)
    work.go.set()
    assert await first == (201, b"reply 1")
    assert await replies.once(ME, "k", "f", work) == (201, b"reply 1")


async def left_by_a_crash(store: Store, at: float) -> None:
    reservation = Reservation((ME.space, "k"))
    assert await StoredReplies(store).reserve(reservation, "f", at=at, since=0) is None


async def test_a_reply_that_is_kept_outlives_the_release_of_its_reservation(store: Store) -> None:
    table, reservation = StoredReplies(store), Reservation((ME.space, "k"))
    assert await table.reserve(reservation, "f", at=1, since=0) is None
    await table.keep(reservation.slot, "f", 201, b"done", at=1)
    table.release(reservation)
    again = await table.reserve(Reservation(reservation.slot), "f", at=1, since=0)
    assert again is not None
    assert (again.status, again.body) == (201, b"done")


async def test_a_reservation_that_a_crash_left_is_not_taken_over(
    replies: IdempotencyCache, store: Store, clock: FakeClock
) -> None:
    """The second call once did the work of the first again."""
    await left_by_a_crash(store, clock.now())
    work = Work()
    with pytest.raises(Conflict, match="another request"):
        await replies.once(ME, "k", "another", work)
    for _ in range(2):
        with pytest.raises(Conflict) as refused:
            await replies.once(ME, "k", "f", work)
        assert refused.value.code == "outcome_unknown"
        assert set(refused.value.details) == {"key", "hint"}
    assert work.done == 0
    clock.advance(3601)
    assert await replies.once(ME, "k", "f", work) == (201, b"reply 1")


async def test_a_reservation_knows_its_run_once_that_is_recorded(
    replies: IdempotencyCache, store: Store, clock: FakeClock
) -> None:
    await left_by_a_crash(store, clock.now())
    await store.write(lambda on: began(on, (ME.space, "k"), "run-1"))
    with pytest.raises(Conflict) as refused:
        await replies.once(ME, "k", "f", Work())
    assert refused.value.details["run_id"] == "run-1"


async def test_a_call_that_is_cancelled_while_it_reserves_frees_its_key(
    replies: IdempotencyCache, store: Store
) -> None:
    call = asyncio.create_task(replies.once(ME, "k", "f", Work()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await replies.once(ME, "k", "f", Work()) == (201, b"reply 1")


async def test_callers_do_not_share_keys(replies: IdempotencyCache) -> None:
    callers = [
        ME,
        Caller("you", "key"),
        Caller("me", "peer"),
        Caller('["token", "me", "u", null, null, null]', "key"),
        Caller("me", "token", user_id="u"),
        Caller("me", "token", user_id="v"),
        Caller("me", "token", user_id="u", conversation_id="c"),
    ]
    work = Work()
    for number, caller in enumerate(callers, start=1):
        assert await replies.once(caller, "k", "f", work) == (201, b"reply %d" % number)
    assert await replies.once(ME, "k", "f", work) == (201, b"reply 1")


async def test_a_reply_that_cannot_be_kept_is_given_all_the_same(
    replies: IdempotencyCache, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> Reply:
        await store.write(
            lambda on: on.execute(
                "CREATE TEMP TRIGGER full BEFORE UPDATE ON main.idempotency"
                " BEGIN SELECT RAISE(ABORT, 'as if the disk were full'); END"
            )
        )
        return 201, b"done"

    assert await replies.once(ME, "k", "f", work) == (201, b"done")
    assert "was not kept" in caplog.text
    again = Work()
    with pytest.raises(Conflict) as refused:  # it is done, and once was done again
        await replies.once(ME, "k", "f", again)
    assert (refused.value.code, again.done) == ("outcome_unknown", 0)


async def test_bytes_come_back_as_they_were(replies: IdempotencyCache) -> None:
    body = bytes(range(256)) * 100

    async def work() -> Reply:
        return 200, body

    await replies.once(ME, "k", "f", work)
    assert await replies.once(ME, "k", "f", work) == (200, body)


# -- how much is kept ------------------------------------------------------------------------------


def of_size(size: int) -> Callable[[], Awaitable[Reply]]:
    async def work() -> Reply:
        return 200, b"x" * size

    return work


async def body_bytes(store: Store) -> int:
    row = await store.row("SELECT coalesce(sum(length(body)), 0) FROM idempotency")
    assert row is not None
    return int(row[0])


async def test_a_long_reply_is_given_once_and_never_done_again(
    replies: IdempotencyCache, store: Store
) -> None:
    assert len((await replies.once(ME, "k", "f", of_size(2 << 20)))[1]) == 2 << 20
    again = Work()
    with pytest.raises(Conflict) as refused:
        await replies.once(ME, "k", "f", again)
    assert (refused.value.code, refused.value.details["key"]) == ("reply_not_kept", "k")
    assert again.done == 0
    assert await body_bytes(store) == 0
    with pytest.raises(Conflict, match="another request"):
        await replies.once(ME, "k", "another", again)


async def test_the_replies_of_an_owner_are_bounded_and_the_oldest_give_way(
    store: Store, clock: FakeClock
) -> None:
    table = StoredReplies(store, one_max=100, bytes_max=1000)
    replies = IdempotencyCache(store, clock, kept=table)
    token = Caller("me", "token", user_id="u")
    you = Caller("you", "key")
    await replies.once(you, "k", "f", of_size(100))
    for number in range(40):
        clock.advance(1)
        await replies.once((ME, token)[number % 2], f"k{number}", "f", of_size(100))
        assert await body_bytes(store) <= 1100
    assert (await replies.once(token, "k39", "f", Work()))[1] == b"x" * 100
    assert (await replies.once(you, "k", "f", Work()))[1] == b"x" * 100
    with pytest.raises(Conflict, match="has been done"):
        await replies.once(ME, "k0", "f", Work())
    anew = IdempotencyCache(store, clock, kept=StoredReplies(store, one_max=100, bytes_max=1000))
    for number in range(40, 60):  # as after a restart, with what is there counted
        clock.advance(1)
        await anew.once(ME, f"k{number}", "f", of_size(100))
        assert await body_bytes(store) <= 1100


async def test_the_keys_of_an_owner_are_bounded_until_old_ones_go(
    store: Store, clock: FakeClock
) -> None:
    replies = IdempotencyCache(store, clock, ttl_s=3600, kept=StoredReplies(store, keys_max=3))
    for number in range(3):
        await replies.once(ME, f"k{number}", "f", Work())
    with pytest.raises(Unavailable) as full:
        await replies.once(ME, "k3", "f", Work())
    assert (full.value.code, full.value.details["limit"]) == ("too_many_idempotency_keys", 3)
    assert await replies.once(ME, "k2", "f", Work()) == (201, b"reply 1")
    await replies.once(Caller("you", "key"), "k3", "f", Work())
    clock.advance(3601)
    with pytest.raises(Broken):
        await replies.once(ME, "k3", "f", failing(Broken("x")))
    for number in range(3):
        await replies.once(ME, f"again{number}", "f", Work())
    with pytest.raises(Unavailable):
        await replies.once(ME, "k3", "f", Work())


async def test_keys_are_counted_once_though_a_full_disk_repeats_a_write(tmp_path: Path) -> None:
    """A transaction that failed at COMMIT, and its repetition, counted one key twice."""
    repeated = 0
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room() -> bool:
        nonlocal repeated
        repeated += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return True

    async with await Store.open_in(tmp_path, on_full=make_room) as store:
        table = StoredReplies(store, keys_max=3)

        async def reserve(key: str) -> None:
            assert await table.reserve(Reservation((ME.space, key)), "f", at=1, since=0) is None

        await reserve("1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            await reserve("2")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert repeated == 1
        await reserve("3")
        with pytest.raises(Unavailable) as full:
            await reserve("4")
    assert full.value.code == "too_many_idempotency_keys"
