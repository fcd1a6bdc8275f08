-- Version 16: deletions that the next start completes, and replies whose content was deleted.

ALTER TABLE projects ADD COLUMN deleted_at REAL;  -- its conversations are being deleted

CREATE TABLE forgotten_users (                    -- whose data is being deleted
    owner   TEXT NOT NULL,
    user_id TEXT NOT NULL,
    PRIMARY KEY (owner, user_id)
) WITHOUT ROWID;

ALTER TABLE idempotency ADD COLUMN erased INTEGER NOT NULL DEFAULT 0;  -- its reply is never kept
CREATE INDEX idempotency_of_run ON idempotency (run_id) WHERE run_id IS NOT NULL;
