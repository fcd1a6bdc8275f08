-- Version 2: several contexts in one conversation.

-- Beside `default`, which every conversation has.
CREATE TABLE contexts (
    sandbox_id   TEXT NOT NULL,
    conversation TEXT NOT NULL,
    name         TEXT NOT NULL,
    created_at   REAL NOT NULL,
    PRIMARY KEY (sandbox_id, conversation, name),
    FOREIGN KEY (sandbox_id, conversation) REFERENCES conversations (sandbox_id, name)
        ON DELETE CASCADE
) WITHOUT ROWID;

ALTER TABLE runs ADD COLUMN context TEXT NOT NULL DEFAULT 'default';
