"""Approvals and the rules that users added with them. An approval belongs to a chat, a rule to a
chat or a project.

One UPDATE of an undecided row settles which of several decisions is first.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sbx.errors import Conflict, NotFound, TooLarge
from sbx.protocol.approvals import Approval, ApprovalDecision, ApprovalScope, StoredApprovalRule
from sbx.store import Store, record
from sbx.store.errors import decoded
from sbx.store.pending import PendingWrites

ARGS_MAX = 4 << 20  # characters of JSON: of the arguments of a call, and of its dry run
DECIDED_MAX = 1000  # kept per chat
RULES_MAX = 1000  # per chat or project
_PAGE_MAX = 8 << 20  # characters of JSON in one page, except for a single larger approval
# The bounds of an `ApprovalScope`, for a chat `c`. Each statement compares the owner itself.
_IN_SCOPE = (
    "(:user_id IS NULL OR c.user_id = :user_id) AND (:agent_id IS NULL OR c.agent_id = :agent_id)"
    " AND (:conversation_id IS NULL OR c.conversation_id = :conversation_id)"
)
_APPROVAL = (
    "SELECT a.*, c.owner, c.conversation_id, c.user_id, c.agent_id, c.project_id"
    " FROM approvals AS a JOIN chats AS c ON c.id = a.chat_id"
)
_RULE = (
    "SELECT r.*, c.conversation_id, c.user_id, c.agent_id"
    " FROM approval_rules AS r LEFT JOIN chats AS c ON c.id = r.chat_id"
)


class ApprovalStore:
    """The approvals of a service or, without a `store`, of one process, in memory. In memory every
    conversation counts as a chat: the agent of a program has no row for it."""

    def __init__(self, store: Store | None = None, pending: PendingWrites | None = None) -> None:
        self._in_memory = store is None
        self._store = store = store or Store.in_memory()
        self._pending = pending or PendingWrites(store)
        self._dropped: set[str] = set()  # revoked rules, until the store has the revocation

    async def add(self, approval: Approval) -> Approval:
        """Add a pending approval.

        Raise NotFound for a conversation without a chat, Conflict for an id that is in use, and
        TooLarge.
        """
        args, dry_run = _written(approval.tool_args), _written(approval.dry_run)
        reach = ApprovalScope(
            approval.owner, approval.user_id, approval.agent_id, approval.conversation_id
        )
        await self._ensure_chat(reach, approval.project_id)

        def act(on: sqlite3.Connection) -> Approval:
            if _get(on, approval.tool_call_id) is not None:
                raise Conflict(f"the call {approval.tool_call_id} already has an approval")
            added = on.execute(
                "INSERT INTO approvals (tool_call_id, chat_id, run_id, tool_name, tool_args,"  # noqa: S608
                " dry_run, created_at, expires_at) SELECT :id, c.id, :run, :tool, :args, :dry_run,"
                f" :created_at, :expires_at FROM chats AS c WHERE c.owner = :owner AND {_IN_SCOPE}",
                {
                    "id": approval.tool_call_id,
                    "run": approval.run_id,
                    "tool": approval.tool_name,
                    "args": args,
                    "dry_run": dry_run,
                    "created_at": approval.created_at,
                    "expires_at": approval.expires_at,
                    **asdict(reach),
                },
            )
            kept = _get(on, approval.tool_call_id)
            if added.rowcount == 0 or kept is None:
                raise NotFound("the conversation was deleted", code="no_conversation")
            _prune(on, approval.tool_call_id)
            return kept

        return await self._store.write(act)

    async def get(self, tool_call_id: str) -> Approval | None:
        return await self._store.read(lambda on: _get(on, tool_call_id))

    async def settle(
        self, tool_call_id: str, decision: ApprovalDecision, rule: StoredApprovalRule | None = None
    ) -> tuple[Approval | None, bool]:
        """Decide an approval. Return it (None if it does not exist), and whether this decision was
        the first; only then add the rule. Raise Conflict `too_many_rules`, and change nothing."""

        def act(on: sqlite3.Connection) -> tuple[Approval | None, bool]:
            won = on.execute(
                "UPDATE approvals SET approved = ?, decided_by = ?, decided_at = ?, remembered = ?"
                " WHERE tool_call_id = ? AND decided_by IS NULL",
                (decision.approved, decision.by, decision.at, decision.remembered, tool_call_id),
            )
            if won.rowcount == 1 and rule is not None:
                _add_rule(on, tool_call_id, rule)
            return _get(on, tool_call_id), won.rowcount == 1

        return await self._store.write(act)

    async def settle_all(
        self, decision: ApprovalDecision, run_id: str | None = None
    ) -> list[Approval]:
        """Decide all pending approvals, or those of a run. Return the decided ones."""

        def act(on: sqlite3.Connection) -> list[Approval]:
            rows = on.execute(
                "UPDATE approvals SET approved = :approved, decided_by = :by, decided_at = :at"
                " WHERE decided_by IS NULL AND (:run IS NULL OR run_id = :run)"
                " RETURNING tool_call_id",
                {"run": run_id, **asdict(decision)},
            ).fetchall()
            decided = (_get(on, row[0]) for row in rows)
            return sorted(filter(None, decided), key=lambda approval: approval.seq)

        return await self._store.write(act)

    async def pending(
        self, reach: ApprovalScope, *, now: float, after: int, limit: int
    ) -> list[Approval]:
        """Return the undecided approvals with `seq` above `after`, in order. None in `reach`
        selects all. Return fewer than `limit` if they would exceed 8 MiB."""
        rows = await self._store.rows(
            "SELECT * FROM (SELECT *, sum(size) OVER (ORDER BY seq) - size AS before FROM"  # noqa: S608
            " (SELECT a.*, c.owner, c.conversation_id, c.user_id, c.agent_id, c.project_id,"
            "  length(tool_args) + coalesce(length(dry_run), 0) AS size"
            "  FROM approvals AS a INDEXED BY approvals_that_wait JOIN chats AS c"
            "  ON c.id = a.chat_id"
            f" WHERE c.owner = :owner AND {_IN_SCOPE}"
            "  AND a.decided_by IS NULL AND a.expires_at > :now AND a.seq > :after"
            "  ORDER BY a.seq LIMIT :limit)) WHERE before < :page_max ORDER BY seq",
            **asdict(reach),
            now=now,
            after=after,
            limit=limit,
            page_max=_PAGE_MAX,
        )
        return [_approval(row) for row in rows]

    async def rules(
        self, reach: ApprovalScope, *, project_id: str | None, after: int, limit: int
    ) -> list[StoredApprovalRule]:
        """Return the rules with `seq` above `after`, in order. A user, an agent and a conversation
        have the rules of their conversations, and none of projects."""
        rows = await self._store.rows(
            f"{_RULE} WHERE r.owner = :owner AND {_IN_SCOPE}"
            " AND (:project IS NULL OR r.project_id = :project) AND r.seq > :after"
            " ORDER BY r.seq LIMIT :limit",
            **asdict(reach),
            project=project_id,
            after=after,
            limit=limit,
        )
        return self._rules_of(rows)

    async def rules_for(
        self, reach: ApprovalScope, *, project_id: str | None, tool_name: str
    ) -> list[StoredApprovalRule]:
        """Return the rules for a tool in a conversation, and those of its project.

        The project counts only if the conversation belongs to it.
        """
        await self._ensure_chat(reach, project_id)
        rows = await self._store.rows(
            "WITH here AS (SELECT id, conversation_id, project_id FROM chats AS c"  # noqa: S608
            f" WHERE c.owner = :owner AND {_IN_SCOPE})"
            " SELECT r.*, here.conversation_id FROM approval_rules AS r JOIN here"
            "  ON r.chat_id = here.id WHERE r.tool_name = :tool"
            " UNION ALL SELECT r.*, NULL FROM approval_rules AS r JOIN here"
            "  ON r.project_id = here.project_id WHERE r.tool_name = :tool"
            "  AND r.project_id = :project",
            **asdict(reach),
            project=project_id,
            tool=tool_name,
        )
        return self._rules_of(rows)

    async def drop_rule(self, rule_id: str, reach: ApprovalScope) -> bool | None:
        """Revoke a rule at once; memory keeps the revocation until the store has it. Return whether
        the store has it; None if no such rule is within reach."""
        row = await self._store.row(
            "SELECT r.id FROM approval_rules AS r LEFT JOIN chats AS c ON c.id = r.chat_id"  # noqa: S608
            f" WHERE r.id = :rule AND r.owner = :owner AND {_IN_SCOPE}",
            **asdict(reach),
            rule=rule_id,
        )
        if row is None or rule_id in self._dropped:
            return None
        self._dropped.add(rule_id)

        def on_done(stored: bool) -> None:
            if stored:
                self._dropped.discard(rule_id)

        stored = await self._pending.write(
            f"the revocation of {rule_id}",
            lambda on: on.execute("DELETE FROM approval_rules WHERE id = ?", (rule_id,)),
            on_done=on_done,
        )
        on_done(stored)
        return stored

    async def _ensure_chat(self, reach: ApprovalScope, project_id: str | None) -> None:
        if not self._in_memory:
            return
        place = (reach.owner, reach.conversation_id, reach.user_id or "", reach.agent_id or "")
        await self._store.write(
            lambda on: on.execute(
                "INSERT INTO chats (id, owner, conversation_id, user_id, agent_id, project_id,"
                " created_at, last_used_at) VALUES (?, ?, ?, ?, ?, ?, 0, 0) ON CONFLICT DO NOTHING",
                (json.dumps(place), *place, project_id),
            )
        )

    def _rules_of(self, rows: Sequence[sqlite3.Row]) -> list[StoredApprovalRule]:
        return [_rule(row) for row in rows if row["id"] not in self._dropped]


def _get(on: sqlite3.Connection, tool_call_id: str) -> Approval | None:
    row = on.execute(f"{_APPROVAL} WHERE a.tool_call_id = ?", (tool_call_id,)).fetchone()
    return None if row is None else _approval(row)


def _prune(on: sqlite3.Connection, tool_call_id: str) -> None:
    """Delete the oldest decided approvals of the chat beyond the limit."""
    on.execute(
        "DELETE FROM approvals WHERE decided_by IS NOT NULL AND chat_id ="
        " (SELECT chat_id FROM approvals WHERE tool_call_id = :call) AND seq <="
        " (SELECT seq FROM approvals WHERE chat_id ="
        "  (SELECT chat_id FROM approvals WHERE tool_call_id = :call)"
        "  ORDER BY seq DESC LIMIT 1 OFFSET :decided_max)",
        {"call": tool_call_id, "decided_max": DECIDED_MAX},
    )


def _add_rule(on: sqlite3.Connection, tool_call_id: str, rule: StoredApprovalRule) -> None:
    """Add a rule to the chat of the call, or to the project of the rule. Ignore a duplicate."""
    (chat_id,) = on.execute(
        "SELECT chat_id FROM approvals WHERE tool_call_id = ?", (tool_call_id,)
    ).fetchone()
    where = (chat_id, None) if rule.project_id is None else (None, rule.project_id)
    (count,) = on.execute(
        "SELECT count(*) FROM approval_rules WHERE chat_id IS ? AND project_id IS ?", where
    ).fetchone()
    if count >= RULES_MAX:
        raise Conflict(
            f"{RULES_MAX} rules are remembered here, and there may be no more",
            code="too_many_rules",
            hint="revoke rules that you no longer need",
            details={"limit": RULES_MAX},
        )
    on.execute(
        "INSERT INTO approval_rules (id, owner, chat_id, project_id, tool_name, kind, text,"
        " made_by, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (
            rule.id,
            rule.owner,
            *where,
            rule.tool_name,
            rule.kind,
            rule.text,
            rule.by,
            rule.created_at,
        ),
    )


def _written(value: Mapping[str, Any] | None) -> str | None:
    if value is None:
        return None
    text = json.dumps(dict(value))
    if len(text) > ARGS_MAX:
        raise TooLarge(
            f"a call that needs an approval may have {ARGS_MAX >> 20} MiB of arguments",
            details={"limit": ARGS_MAX},
        )
    return text


def _approval(row: sqlite3.Row) -> Approval:
    decision = None
    if row["decided_by"] is not None:
        decision = ApprovalDecision(
            bool(row["approved"]), row["decided_by"], row["decided_at"], row["remembered"]
        )
    return record(
        Approval,
        row,
        tool_args=decoded(row["tool_args"]),
        dry_run=None if row["dry_run"] is None else decoded(row["dry_run"]),
        decision=decision,
    )


def _rule(row: sqlite3.Row) -> StoredApprovalRule:
    return record(StoredApprovalRule, row, by=row["made_by"])
