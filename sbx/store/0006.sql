-- Version 6: each caller, user and agent has its own names.

-- The run that a call with an idempotency key began. Without a status and without a call of this
-- process, the outcome of the call is unknown.
ALTER TABLE idempotency ADD COLUMN run_id TEXT;

-- A space is now always JSON: ["key", owner], ["peer", owner] or ["token", owner, bounds…]. An owner
-- whose name looked like the bounds of a token had its space: such rows belong to nobody for sure.
DELETE FROM idempotency WHERE owner GLOB '[[]*' AND owner IN (SELECT owner FROM keys);
DELETE FROM idempotency WHERE owner GLOB '*[^ -~]*';  -- Python escapes these, SQLite does not
UPDATE idempotency SET owner = CASE
    WHEN owner GLOB '[[]*' THEN '["token", ' || substr(owner, 2)
    WHEN owner GLOB 'uid:[0-9]*' THEN '["peer", ' || json_quote(owner) || ']'
    ELSE '["key", ' || json_quote(owner) || ']'
END;

-- Conversation ids of agents are those of one user and one agent.
DROP INDEX one_chat_per_conversation;
CREATE UNIQUE INDEX one_chat_per_conversation ON chats (owner, conversation_id, user_id, agent_id);
