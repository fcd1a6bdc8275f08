-- Version 15: the key that made a token, and whose revocation ends it.

ALTER TABLE tokens ADD COLUMN key_id TEXT;
