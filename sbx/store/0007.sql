-- Version 7: the words of today: workspace, dry run, honeytoken, mount.

ALTER TABLE cargos RENAME TO workspaces;
DROP INDEX cargos_of_owner;
CREATE INDEX workspaces_of_owner ON workspaces (owner, id) WHERE deleted_at IS NULL;

ALTER TABLE sandboxes RENAME COLUMN cargo_id TO workspace_id;
DROP INDEX sandboxes_of_cargo;
CREATE INDEX sandboxes_of_workspace ON sandboxes (workspace_id);

ALTER TABLE approvals RENAME COLUMN rehearsal TO dry_run;

-- A result may have values that SQLite does not take for JSON, such as NaN.
UPDATE runs SET cause = 'honeytoken', result = CASE
    WHEN json_valid(result) THEN json_set(result, '$.cause', 'honeytoken')
    ELSE replace(result, '"status":"killed","cause":"tripwire"',
                 '"status":"killed","cause":"honeytoken"')
END WHERE cause = 'tripwire';
UPDATE sandboxes SET failure = json_remove(
    json_set(failure, '$.code', 'honeytoken',
             '$.details.token', json_extract(failure, '$.details.wire')),
    '$.details.wire'
) WHERE CASE WHEN json_valid(failure) THEN json_extract(failure, '$.code') END = 'tripwire';

UPDATE events SET type = 'honeytoken', details = json_remove(
    json_set(details, '$.token', json_extract(details, '$.wire')), '$.wire'
) WHERE type = 'tripwire';
UPDATE events SET cause = 'honeytoken' WHERE cause = 'tripwire';
UPDATE events SET type = CASE type
    WHEN 'lifted' THEN 'unfrozen'
    WHEN 'attached' THEN 'mounted'
    WHEN 'detached' THEN 'unmounted'
END WHERE type IN ('lifted', 'attached', 'detached');
