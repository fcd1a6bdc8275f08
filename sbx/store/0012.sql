-- Version 12: tasks from templates, with the state of each input.

CREATE TABLE tasks (
    id         TEXT PRIMARY KEY,
    owner      TEXT NOT NULL,
    template   TEXT NOT NULL,                    -- its name
    user_id    TEXT NOT NULL,
    agent_id   TEXT NOT NULL,
    created_at REAL NOT NULL,
    ended_at   REAL                              -- NULL: inputs wait or run
);

CREATE INDEX tasks_by_owner ON tasks (owner, created_at);

CREATE TABLE task_inputs (
    task_id         TEXT NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    number          INTEGER NOT NULL,            -- from 1
    parameters      TEXT NOT NULL,               -- JSON
    conversation_id TEXT NOT NULL,
    state           TEXT NOT NULL,               -- waiting, running, or the reason of its end
    run_id          TEXT,
    answer          TEXT,
    error           TEXT,                        -- JSON
    tokens          INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (task_id, number)
) WITHOUT ROWID;
