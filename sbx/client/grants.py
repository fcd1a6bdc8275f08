"""The grants of a conversation in a service, with the methods of the embedded `Grants`."""

import json
from functools import partial

from sbx.client.conversation_calls import ConversationCalls
from sbx.client.errors import decode
from sbx.client.http import target
from sbx.protocol.fields import read_fields
from sbx.protocol.grants import AccessKind, Grant, GrantDuration


class RemoteGrants:
    """The access of one conversation beyond its policy."""

    def __init__(self, calls: ConversationCalls) -> None:
        self._calls = calls
        self._path = f"{calls.path}/grants"

    async def list(self) -> "list[Grant]":
        """Return the grants that are valid now, the oldest first."""
        reply = await self._calls.call("GET", self._path)
        return [decode("grant", _grant, item) for item in reply["items"]]

    async def add(self, kind: AccessKind, target: str, duration: GrantDuration = "once") -> Grant:
        """Grant access that the policy permits to grant: `target` is `host:port`, the name of a
        secret, an absolute path of the host, the seconds of a run, or the MiB of the sandbox.
        `once` is for the next run.

        Raise Denied `not_grantable`, also for a duration that is too long, and `rule_not_permitted`
        for a token; Conflict `too_many_grants`.
        """
        body = json.dumps({"kind": kind, "target": target, "duration": duration}).encode()
        return decode("grant", _grant, await self._calls.call("POST", self._path, body=body))

    async def revoke(self, grant_id: str) -> None:
        """End a grant now, and close its connections. Raise NotFound `no_such_grant`."""
        await self._calls.call("DELETE", f"{self._path}{target(grant_id)}")


_grant = partial(read_fields, Grant)
