"""Conversations of `sbx chat`: what was said is kept on this machine, the files in a sandbox.

    here     in this process (talk_here.py), maybe in a directory of the person's
    there    in a sandbox of its own in a service; only what was said is kept here

One process at a time uses a directory of conversations.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from sbx.cli.talk import OWNER, Talk, Wanted, approvals_of, history_of, row_of, told_plainly
from sbx.cli.talk_here import drop, house_at, opened_here
from sbx.client import Client
from sbx.errors import BadRequest, NotFound
from sbx.isolation.patience import in_thread
from sbx.runtime.data import Data
from sbx.runtime.store import Store, chats
from sbx.runtime.store.chats import ChatRow

_DEFAULT = "default"
_LIST_MAX = 500


@asynccontextmanager
async def opened(wanted: Wanted) -> AsyncIterator[Talk]:
    """A conversation, in use until this is left; one in which nothing was said is not kept.

    Raises NotFound `no_conversation`, BadRequest, Conflict `data_dir_in_use`, and what a house, a
    sandbox, a project and a service do.
    """
    opening = _opened_there(wanted) if wanted.connect else opened_here(wanted)
    async with opening as talk:
        yield talk


async def listed(directory: Path) -> list[tuple[ChatRow, str]]:
    """The conversations that are kept, the last used first, each with what was said first."""
    found = []
    async with _store(directory) as store:
        for row in await chats.of_owner(store, OWNER, limit=_LIST_MAX):
            first = await history_of(store, row).messages(limit=1)
            found.append((row, first[0].message.content if first else ""))
    return found


async def removed(wanted: Wanted) -> None:
    """Forget a conversation, and remove its files. Raises NotFound `no_conversation`, BadRequest
    for one in a service that was not named."""
    if wanted.connect:
        async with _store(wanted.directory) as store, _client(wanted) as client:
            row = await row_of(store, wanted, "")
            with suppress(NotFound):  # the service has removed it already
                await client.delete(row.agent_id)
            await chats.delete(store, row.id)
    else:
        async with house_at(wanted.directory) as house:
            await drop(house, await row_of(house.store, wanted, ""))


# -- in a service ----------------------------------------------------------------------------------


@asynccontextmanager
async def _opened_there(wanted: Wanted) -> AsyncIterator[Talk]:
    if wanted.project is not None:
        raise BadRequest(
            "a project is a directory of this machine, and --connect a sandbox in a service",
            hint="leave one of them out",
        )
    async with _store(wanted.directory) as store, _client(wanted) as client:
        if wanted.resume is None:
            box = await client.create(wanted.policy)
            row = await chats.ensure(store, await row_of(store, wanted, box.id))
        else:
            row = await row_of(store, wanted, "")
            box = client.sandbox(row.agent_id)
        history = history_of(store, row)
        try:
            approvals = await approvals_of(store, wanted)
            yield Talk(row, box.conversation(_DEFAULT), history, approvals)
        finally:
            if not await history.messages(limit=1):
                await chats.delete(store, row.id)
                await box.close()


def _client(wanted: Wanted) -> Client:
    return Client(wanted.connect, key=wanted.key)


@asynccontextmanager
async def _store(directory: Path) -> AsyncIterator[Store]:
    """What was said, without a house around it."""
    with told_plainly(directory):
        data = await in_thread(partial(Data, directory, keep=True))
    try:
        store = await Store.of_data(directory)
        try:
            yield store
        finally:
            await store.close()
    finally:
        await in_thread(data.close)
