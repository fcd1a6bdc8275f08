"""Conversations of `sbx chat`. The messages are stored on this machine, the files in a sandbox.

    here     the sandbox is in this process (talk_here.py), perhaps with a directory of the user
    there    the sandbox is in a service; only the messages are stored here

Only one process at a time uses a directory of conversations.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from sbx.aio import in_thread
from sbx.cli.chat_store import (
    OWNER,
    ChatConversation,
    ChatSelection,
    approvals_of,
    history_of,
    plain_errors,
    row_of,
)
from sbx.cli.talk_here import drop, opened_here, service_at
from sbx.client import Client
from sbx.errors import BadRequest, NotFound
from sbx.runtime.data_dir import DataDirLock
from sbx.store import Store, chats
from sbx.store.chats import ChatRow

_DEFAULT = "default"
_LIST_MAX = 500


@asynccontextmanager
async def opened(options: ChatSelection) -> AsyncIterator[ChatConversation]:
    """Open a conversation until the context exits. Delete it if it has no message.

    Raise NotFound `no_conversation`, BadRequest, Conflict `data_dir_in_use`, and the errors of
    `Service`, of a sandbox, of a project and of the service.
    """
    opening = _opened_there(options) if options.connect else opened_here(options)
    async with opening as conversation:
        yield conversation


async def listed(directory: Path) -> list[tuple[ChatRow, str]]:
    """Return the stored conversations, the last used first, each with its first message."""
    conversations = []
    async with _store(directory) as store:
        for row in await chats.of_owner(store, OWNER, limit=_LIST_MAX):
            first = await history_of(store, row).messages(limit=1)
            conversations.append((row, first[0].message.content if first else ""))
    return conversations


async def removed(options: ChatSelection) -> None:
    """Delete a conversation and its files.

    Raise NotFound `no_conversation`, and BadRequest for a conversation in a service if the options
    do not name the service.
    """
    if options.connect:
        async with _store(options.directory) as store, _client(options) as client:
            row = await row_of(store, options, "")
            with suppress(NotFound):  # the service has already removed it
                await client.delete(row.agent_id)
            await chats.delete(store, row.id)
    else:
        async with service_at(options.directory) as service:
            await drop(service, await row_of(service.store, options, ""))


# -- in a service ----------------------------------------------------------------------------------


@asynccontextmanager
async def _opened_there(options: ChatSelection) -> AsyncIterator[ChatConversation]:
    if options.project is not None:
        raise BadRequest(
            "--project is a directory of this machine, and --connect uses a sandbox in a service",
            hint="omit one of them",
        )
    async with _store(options.directory) as store, _client(options) as client:
        if options.resume is None:
            box = await client.create(options.policy)
            row = await chats.ensure(store, await row_of(store, options, box.id))
        else:
            row = await row_of(store, options, "")
            box = client.sandbox(row.agent_id)
        history = history_of(store, row)
        try:
            approvals = await approvals_of(store, options)
            yield ChatConversation(row, box.conversation(_DEFAULT), history, approvals)
        finally:
            if not await history.messages(limit=1):
                await chats.delete(store, row.id)
                await box.close()


def _client(options: ChatSelection) -> Client:
    return Client(options.connect, key=options.key)


@asynccontextmanager
async def _store(directory: Path) -> AsyncIterator[Store]:
    """Open the store of the messages without a `Service`."""
    with plain_errors(directory):
        data = await in_thread(partial(DataDirLock, directory, keep=True))
    try:
        store = await Store.of_data(directory)
        try:
            yield store
        finally:
            await store.close()
    finally:
        await in_thread(data.close)
