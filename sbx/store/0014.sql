-- Version 14: the name of the policy of a sandbox, which had the word of Bay for it.

ALTER TABLE sandboxes RENAME COLUMN profile TO policy_name;
