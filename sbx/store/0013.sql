-- Version 13: budgets for the changes of one call, of each conversation in a project.

ALTER TABLE chats ADD COLUMN change_budgets TEXT NOT NULL DEFAULT '[]'; -- JSON
