-- Version 9: labels of a sandbox, which the surfaces of other SDKs keep there.

ALTER TABLE sandboxes ADD COLUMN labels TEXT;
