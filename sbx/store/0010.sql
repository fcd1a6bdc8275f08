-- Version 10: logins of browsers, titles of conversations, and templates of prompts.

CREATE TABLE console_sessions (
    id           TEXT PRIMARY KEY,
    hash         TEXT NOT NULL UNIQUE,           -- of the cookie, SHA-256 in hex
    owner        TEXT NOT NULL,
    operator     INTEGER NOT NULL,
    token_id     TEXT,                           -- the token whose rights it has; NULL: all of its owner
    key_id       TEXT,                           -- the key that requested the login, if one did
    user_agent   TEXT NOT NULL,
    created_at   REAL NOT NULL,
    last_seen_at REAL NOT NULL,
    expires_at   REAL NOT NULL
);
CREATE INDEX console_sessions_of_owner ON console_sessions (owner, created_at);

ALTER TABLE chats ADD COLUMN title TEXT;         -- NULL: no message yet, or from an earlier version

CREATE TABLE templates (
    id          TEXT PRIMARY KEY,
    owner       TEXT NOT NULL,
    name        TEXT NOT NULL,
    description TEXT NOT NULL,
    prompt      TEXT NOT NULL,
    variables   TEXT NOT NULL,                   -- JSON
    project_id  TEXT REFERENCES projects (id) ON DELETE SET NULL,
    max_steps   INTEGER,
    created_at  REAL NOT NULL
);
CREATE INDEX templates_of_owner ON templates (owner, created_at);
