-- Version 14: the word policy for the policy of a sandbox, which was the word of Bay.

ALTER TABLE sandboxes RENAME COLUMN profile TO policy_name;
UPDATE events SET details = replace(details, '{"profile": ', '{"policy": ') WHERE type = 'created';
