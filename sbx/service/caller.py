"""The caller of a request, and its rights."""

import json
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. `user_id`, `agent_id` and `conversation_id` are the bounds of a token; None:
    unbound.

    `operator`: may use the admin routes, and sees all owners where a route offers that. `scopes`:
    None is all of them. `via`: `console` is the login of a browser with all rights of its owner;
    one with the rights of a token is `token`. `via_id`: the key, token or login, for the record;
    None for a peer. It gives no right, so callers that differ in nothing else are equal. `peeks`:
    this request only observes, and does not count as a use of a sandbox.
    """

    owner: str
    via: Literal["peer", "key", "token", "console"]
    operator: bool = False
    scopes: frozenset[str] | None = None
    user_id: str | None = None
    agent_id: str | None = None
    conversation_id: str | None = None
    via_id: str | None = field(default=None, compare=False)
    peeks: bool = field(default=False, compare=False)

    @property
    def who(self) -> str:
        """The owner and, as the last word, the key or token: `ann tok-…`. A peer is its uid."""
        return self.owner if self.via_id is None else f"{self.owner} {self.via_id}"

    def may(self, scope: str) -> bool:
        return self.scopes is None or scope in self.scopes

    def sees(
        self, user_id: str | None, agent_id: str | None, conversation: str | None = None
    ) -> bool:
        """Return whether a sandbox of this user and agent, and this conversation, lie within the
        bounds.

        Without a conversation, this is about the sandbox itself. For an act on all its
        conversations at once (delete, stop, list), check `whole_sandbox` too.
        """
        return (
            (self.user_id is None or self.user_id == user_id)
            and (self.agent_id is None or self.agent_id == agent_id)
            and (
                conversation is None
                or self.conversation_id is None
                or self.conversation_id == conversation
            )
        )

    @property
    def whole_sandbox(self) -> bool:
        """Whether this caller reaches every conversation of a sandbox that it sees."""
        return self.conversation_id is None

    @property
    def space(self) -> str:
        """Return the space of the caller's idempotency keys, as JSON: `[kind, owner, …]`.

        Only callers of one kind with the same owner, bounds and scopes get each other's replies.
        An owner's name is data within the JSON, so no name can be another caller's space.
        """
        if self.via != "token":
            return json.dumps([self.via, self.owner])
        scopes = None if self.scopes is None else sorted(self.scopes)
        bounds = [self.user_id, self.agent_id, self.conversation_id, scopes]
        return json.dumps([self.via, self.owner, *bounds])
