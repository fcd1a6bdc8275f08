-- Version 18: the steps of the inputs of tasks, and results that are used again.

CREATE TABLE new_task_inputs (
    task_id         TEXT NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    number          INTEGER NOT NULL,            -- from 1
    parameters      TEXT NOT NULL,               -- JSON; null: its content is deleted
    conversation_id TEXT NOT NULL,
    state           TEXT NOT NULL,               -- waiting, running, or the reason of its end
    run_id          TEXT,
    answer          TEXT,
    error           TEXT,                        -- JSON
    tokens          INTEGER NOT NULL DEFAULT 0,
    step            TEXT NOT NULL DEFAULT '',    -- empty: a task without steps
    cache_key       TEXT,                        -- a hash of its input
    cached          INTEGER NOT NULL DEFAULT 0,  -- the result of an earlier one
    PRIMARY KEY (task_id, number, step)
);

INSERT INTO new_task_inputs (task_id, number, parameters, conversation_id, state, run_id, answer,
                             error, tokens)
    SELECT task_id, number, parameters, conversation_id, state, run_id, answer, error, tokens
    FROM task_inputs;

DROP TABLE task_inputs;
ALTER TABLE new_task_inputs RENAME TO task_inputs;
CREATE INDEX task_inputs_by_cache_key ON task_inputs (cache_key) WHERE cache_key IS NOT NULL;
