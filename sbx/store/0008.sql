-- Version 8: the life of a session slides, and an expired session is restored with its files.

ALTER TABLE sandboxes ADD COLUMN ttl_s REAL;
ALTER TABLE sandboxes ADD COLUMN restored INTEGER NOT NULL DEFAULT 0;
UPDATE sandboxes SET ttl_s = expires_at - created_at
 WHERE session_id IS NOT NULL AND expires_at > created_at;
