"""Changes of a service, for those who show it: sandboxes, approvals, chats, projects, uploads.

A notice is not stored and not repeated: a client follows first and reads the present state then. A
client that does not keep up loses its subscription instead of single notices.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from sbx.service.caller import Caller

_WAITING_MAX = 1000


class Notice(Struct, frozen=True):
    """`body` has a `type`, such as `sandbox` or `chat.ended`, and ids: the client reads the rest by
    a route. A notice goes to the callers that see this user, agent and conversation and have one of
    `scopes`, those of that route; empty: all of them. One `of_project` goes to no token."""

    owner: str
    body: Mapping[str, Any]
    scopes: tuple[str, ...]
    user_id: str | None = None
    agent_id: str | None = None
    conversation_id: str | None = None
    of_project: bool = False


class Subscription:
    """The notices for one caller, from its creation on."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._queue: asyncio.Queue[Notice | None] = asyncio.Queue(_WAITING_MAX + 1)
        self.lost = False

    def offer(self, notice: Notice) -> None:
        caller = self._caller
        if notice.owner != caller.owner or self.lost:
            return
        if notice.of_project and caller.via == "token":
            return
        if not caller.sees(notice.user_id, notice.agent_id, notice.conversation_id):
            return
        if notice.scopes and not any(map(caller.may, notice.scopes)):
            return
        self.lost = self._queue.qsize() >= _WAITING_MAX
        self._queue.put_nowait(None if self.lost else notice)

    async def next(self) -> Notice | None:
        """Return the next notice; None once one was lost."""
        return await self._queue.get()


class Notices:
    """All subscriptions of a service."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    def publish(self, notice: Notice) -> None:
        for subscription in self._subscriptions:
            subscription.offer(notice)

    def follow(self, caller: Caller) -> Subscription:
        """Begin a subscription, for `leave` at its end."""
        subscription = Subscription(caller)
        self._subscriptions.add(subscription)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
