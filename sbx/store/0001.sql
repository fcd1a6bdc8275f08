-- What the service remembers. Times are seconds of the epoch; ids are ours and opaque.
-- Version 1. A released file is never changed: what follows goes into the next number.

CREATE TABLE cargos (
    id               TEXT PRIMARY KEY,
    owner            TEXT NOT NULL,
    managed_by       TEXT,                      -- the sandbox it lives and dies with
    directory        TEXT NOT NULL UNIQUE,      -- opaque, below the data directory
    uid              INTEGER,                   -- the host uid its files belong to
    size_limit_mb    INTEGER,
    created_at       REAL NOT NULL,
    last_accessed_at REAL NOT NULL,
    deleted_at       REAL
);
CREATE INDEX cargos_of_owner ON cargos (owner, id) WHERE deleted_at IS NULL;

CREATE TABLE sandboxes (
    id                 TEXT PRIMARY KEY,
    owner              TEXT NOT NULL,
    profile            TEXT NOT NULL,           -- the policy's name, as it was asked for
    request            TEXT NOT NULL DEFAULT '{}',  -- JSON: narrower, env
    cargo_id           TEXT NOT NULL REFERENCES cargos (id),
    created_at         REAL NOT NULL,
    expires_at         REAL,                    -- NULL: never
    idle_expires_at    REAL,
    stopped            INTEGER NOT NULL DEFAULT 0,  -- by request, and not used since
    failure            TEXT,                    -- JSON: why the last start failed
    deleted_at         REAL,
    cause              TEXT,                    -- the tombstone: why it ended
    files_removed      INTEGER NOT NULL DEFAULT 0,
    session_id         TEXT,
    user_id            TEXT,
    agent_id           TEXT,
    business_domain_id TEXT,
    upload_limits      TEXT,                    -- JSON
    recreated_because  TEXT
);
CREATE INDEX sandboxes_of_owner ON sandboxes (owner, id) WHERE deleted_at IS NULL;
CREATE INDEX sandboxes_of_cargo ON sandboxes (cargo_id);
CREATE INDEX sandboxes_by_expiry ON sandboxes (expires_at)
    WHERE deleted_at IS NULL AND expires_at IS NOT NULL;
CREATE INDEX sandboxes_by_idle_expiry ON sandboxes (idle_expires_at)
    WHERE deleted_at IS NULL AND idle_expires_at IS NOT NULL;
CREATE INDEX sandboxes_with_files_to_remove ON sandboxes (deleted_at)
    WHERE deleted_at IS NOT NULL AND files_removed = 0;
CREATE UNIQUE INDEX one_live_sandbox_per_session ON sandboxes (owner, session_id)
    WHERE session_id IS NOT NULL AND deleted_at IS NULL;

CREATE TABLE conversations (
    sandbox_id   TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    name         TEXT NOT NULL,
    directory    TEXT NOT NULL,                 -- opaque, below the cargo's
    created_at   REAL NOT NULL,
    last_used_at REAL NOT NULL,
    PRIMARY KEY (sandbox_id, name)
) WITHOUT ROWID;

-- The file is the truth; this says who put it there, and when.
CREATE TABLE uploads (
    sandbox_id   TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    conversation TEXT NOT NULL,
    name         TEXT NOT NULL,
    size         INTEGER NOT NULL,
    sha256       TEXT NOT NULL,
    uploaded_at  REAL NOT NULL,
    uploaded_by  TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, conversation, name)
) WITHOUT ROWID;

CREATE TABLE runs (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    id           TEXT NOT NULL UNIQUE,
    sandbox_id   TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    conversation TEXT NOT NULL,
    kind         TEXT NOT NULL,
    code         TEXT NOT NULL,
    status       TEXT NOT NULL,                 -- 'running' until it ends
    cause        TEXT,
    result       TEXT,                          -- JSON
    started_at   REAL NOT NULL,
    ended_at     REAL,
    duration_ms  REAL,
    description  TEXT,
    tags         TEXT,
    notes        TEXT
);
CREATE INDEX runs_of_sandbox ON runs (sandbox_id, seq);
CREATE INDEX runs_that_run ON runs (seq) WHERE status = 'running';

CREATE TABLE keys (
    id           TEXT PRIMARY KEY,
    owner        TEXT NOT NULL,
    name         TEXT,
    hash         TEXT NOT NULL UNIQUE,          -- SHA-256 of the key, in hex; never the key
    operator     INTEGER NOT NULL DEFAULT 0,
    created_at   REAL NOT NULL,
    last_used_at REAL,
    revoked_at   REAL
);

CREATE TABLE tokens (
    id              TEXT PRIMARY KEY,           -- the token's jti; the token itself is not kept
    owner           TEXT NOT NULL,
    user_id         TEXT NOT NULL,
    agent_id        TEXT,
    conversation_id TEXT,
    scopes          TEXT,                       -- JSON list; NULL: all
    created_at      REAL NOT NULL,
    expires_at      REAL NOT NULL,
    revoked_at      REAL
);
CREATE INDEX tokens_of_owner ON tokens (owner, id);

-- Calls with an Idempotency-Key. Without a status: reserved, and its call not answered yet.
CREATE TABLE idempotency (
    owner       TEXT NOT NULL,
    key         TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    status      INTEGER,
    body        BLOB,
    created_at  REAL NOT NULL,
    PRIMARY KEY (owner, key)
);
CREATE INDEX idempotency_by_age ON idempotency (created_at);

-- The life of sandboxes, tombstones included.
CREATE TABLE events (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    at         REAL NOT NULL,
    type       TEXT NOT NULL,
    cause      TEXT,
    details    TEXT NOT NULL DEFAULT '{}'       -- JSON
);
CREATE INDEX events_of_sandbox ON events (sandbox_id, seq);
