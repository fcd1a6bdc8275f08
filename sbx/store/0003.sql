-- Version 3: the agent's memory.

-- A working directory of the host that agents work in. Nothing of it is ours but this row.
CREATE TABLE projects (
    id                TEXT PRIMARY KEY,
    owner             TEXT NOT NULL,
    name              TEXT NOT NULL,
    working_directory TEXT NOT NULL,
    sandbox_enabled   INTEGER NOT NULL DEFAULT 1,
    created_at        REAL NOT NULL
);
CREATE INDEX projects_of_owner ON projects (owner, id);

-- A conversation with a model. One that was deleted and begun anew has another id, so that a run
-- which outlives the first writes nothing into the second.
CREATE TABLE chats (
    id                 TEXT PRIMARY KEY,
    owner              TEXT NOT NULL,
    conversation_id    TEXT NOT NULL,
    user_id            TEXT NOT NULL,
    agent_id           TEXT NOT NULL,
    business_domain_id TEXT,
    sandbox_id         TEXT REFERENCES sandboxes (id) ON DELETE CASCADE,
    project_id         TEXT REFERENCES projects (id) ON DELETE CASCADE,  -- NULL: temporary
    created_at         REAL NOT NULL,
    last_used_at       REAL NOT NULL,
    last_seq           INTEGER NOT NULL DEFAULT 0,  -- of its messages; never used twice
    bytes              INTEGER NOT NULL DEFAULT 0   -- of its messages
);
CREATE UNIQUE INDEX one_chat_per_conversation ON chats (owner, conversation_id);
CREATE INDEX chats_of_sandbox ON chats (sandbox_id) WHERE sandbox_id IS NOT NULL;
CREATE INDEX chats_of_project ON chats (project_id) WHERE project_id IS NOT NULL;

CREATE TABLE messages (
    chat_id    TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    seq        INTEGER NOT NULL,
    role       TEXT NOT NULL,
    message    TEXT NOT NULL,                   -- JSON
    covers     INTEGER,                         -- a summary stands for all up to this one
    created_at REAL NOT NULL,
    PRIMARY KEY (chat_id, seq)
);

CREATE TABLE agent_runs (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT NOT NULL UNIQUE,
    chat_id    TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    status     TEXT NOT NULL,                   -- 'running', then 'ended' or 'interrupted'
    reason     TEXT,                            -- of an ended one
    model      TEXT NOT NULL,
    max_steps  INTEGER NOT NULL,
    usage      TEXT,                            -- JSON
    error      TEXT,                            -- JSON
    started_at REAL NOT NULL,
    ended_at   REAL
);
CREATE INDEX agent_runs_of_chat ON agent_runs (chat_id, seq);
CREATE UNIQUE INDEX one_running_agent_run_per_chat ON agent_runs (chat_id)
    WHERE status = 'running';

-- A person's yes or no to one tool call. Pending as long as nobody decided.
CREATE TABLE approvals (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    tool_call_id TEXT NOT NULL UNIQUE,
    chat_id      TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    run_id       TEXT NOT NULL,
    tool_name    TEXT NOT NULL,
    tool_args    TEXT NOT NULL,                 -- JSON
    rehearsal    TEXT,                          -- JSON
    created_at   REAL NOT NULL,
    expires_at   REAL NOT NULL,
    approved     INTEGER,
    decided_by   TEXT,                          -- NULL: pending
    decided_at   REAL,
    remembered   TEXT
);
CREATE INDEX approvals_of_chat ON approvals (chat_id, seq);
CREATE INDEX approvals_that_wait ON approvals (seq) WHERE decided_by IS NULL;

-- "Always allow", for one conversation or one project.
CREATE TABLE approval_rules (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT NOT NULL UNIQUE,
    owner      TEXT NOT NULL,
    chat_id    TEXT REFERENCES chats (id) ON DELETE CASCADE,
    project_id TEXT REFERENCES projects (id) ON DELETE CASCADE,
    tool_name  TEXT NOT NULL,
    kind       TEXT NOT NULL,                   -- 'exact' or 'prefix'
    text       TEXT NOT NULL,
    made_by    TEXT NOT NULL,
    created_at REAL NOT NULL,
    CHECK ((chat_id IS NULL) != (project_id IS NULL))
);
CREATE UNIQUE INDEX one_approval_rule_of_a_kind ON approval_rules
    (coalesce(chat_id, ''), coalesce(project_id, ''), tool_name, kind, text);
CREATE INDEX approval_rules_of_owner ON approval_rules (owner, seq);
CREATE INDEX approval_rules_of_chat ON approval_rules (chat_id) WHERE chat_id IS NOT NULL;
CREATE INDEX approval_rules_of_project ON approval_rules (project_id) WHERE project_id IS NOT NULL;
