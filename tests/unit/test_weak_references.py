"""Weak dictionaries and finalizers: each has a reason here, and none keeps its own key alive."""

import asyncio
import gc
import re
import weakref
from collections import Counter
from pathlib import Path

import sbx
from sbx.aio import CALLER, kept_with, long_call
from sbx.errors import Unavailable

# WeakKeyDictionary has no place: a value that refers to its key keeps both for ever, and locks,
# futures and tasks refer to their loop. `aio.kept_with` keeps such a value on its owner.
REASONS = {
    ("aio.py", "WeakValueDictionary"): "an owner's semaphore, which its waiting calls hold",
    ("agent/approvals.py", "WeakValueDictionary"): "a question, which its waiting call holds",
    ("api/agent_v1/mcp.py", "WeakValueDictionary"): "calls, which hold their entry by themselves",
    ("kernels/channel.py", "WeakValueDictionary"): "an owner's budget, which its sandboxes hold",
    ("service/limits.py", "WeakValueDictionary"): "an owner's semaphore, which its uploads hold",
    ("service/sessions.py", "WeakValueDictionary"): "a session's lock, which its holders hold",
    ("jupyter/provisioner.py", "finalize"): "`_let_go` gets the notebook, not the provisioner",
    ("sync/sandbox.py", "finalize"): "`_abandon` gets the inner sandbox, not its face",
    ("guest/kernel/ending.py", "finalize"): "a fork forgets the finalizers of its parent",
    ("store/__init__.py", "finalize"): "`close` belongs to the connection, not to the worker",
}


def test_each_weak_dictionary_has_a_reason() -> None:
    """Two weak dictionaries of the service kept every conversation until its restart, because the
    values in them referred to their keys (holes 2.2b, 2.2c)."""
    top = Path(sbx.__file__).parent
    uses = {
        (str(path.relative_to(top)), name)
        for path in top.rglob("*.py")
        if "weakref" in (text := path.read_text(encoding="utf-8"))
        for name in re.findall(
            r"^(?!from|import).*?\b(Weak(?:Key|Value)\w+|finalize)\b", text, re.M
        )
    }
    assert uses == REASONS.keys()


class Owner:
    pass


class Kept:
    owner: object = None


def test_an_object_that_is_kept_ends_with_its_owner_although_it_refers_to_it() -> None:
    owner = Owner()
    kept = kept_with(owner, Kept)
    kept.owner = owner
    assert kept_with(owner, Kept) is kept
    assert kept_with(Owner(), Kept) is not kept
    reference = weakref.ref(owner)
    del owner, kept
    gc.collect()
    assert reference() is None


async def test_long_calls_of_one_owner_leave_a_turn_to_others() -> None:
    """Searches of one owner took all three turns: those of others were refused after 30 s."""
    started: list[str] = []
    go_on = asyncio.Event()

    async def call(owner: str) -> None:
        CALLER.set(owner)
        async with long_call():
            started.append(owner)
            await go_on.wait()

    calls = [asyncio.create_task(call("one")) for _ in range(4)]
    await asyncio.sleep(0)
    calls += [asyncio.create_task(call(owner)) for owner in ("two", "three")]
    while len(started) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert started == ["one", "one", "two"]
    go_on.set()
    await asyncio.gather(*calls)
    assert Counter(started) == {"one": 4, "two": 1, "three": 1}


def test_a_closed_loop_is_not_kept_by_the_calls_that_waited_in_it() -> None:
    """Each loop of an embedding program stayed: its semaphore referred to it once a call waited."""

    async def wait() -> weakref.ref[asyncio.AbstractEventLoop]:
        async def one() -> None:
            async with long_call():
                await asyncio.sleep(0)

        try:
            await asyncio.gather(*(one() for _ in range(5)))
        except Unavailable:
            raise AssertionError from None
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(wait())
    gc.collect()
    assert loop() is None
