-- Version 11: profiles of agents, in versions. A conversation keeps the version that it began with.

CREATE TABLE agent_profiles (
    id         TEXT PRIMARY KEY,
    owner      TEXT NOT NULL,                    -- '': a file of the operator
    agent_id   TEXT NOT NULL,
    version    INTEGER NOT NULL,
    body       TEXT NOT NULL,                    -- JSON
    created_at REAL NOT NULL,
    deleted    INTEGER NOT NULL DEFAULT 0,
    UNIQUE (owner, agent_id, version)
);

ALTER TABLE chats ADD COLUMN profile_id TEXT REFERENCES agent_profiles (id);  -- NULL: none

ALTER TABLE agent_runs ADD COLUMN report TEXT;   -- JSON: steps, tools and failures of an ended run
