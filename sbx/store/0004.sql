-- Version 4: which file changes of an agent in a project a person is asked about.

ALTER TABLE chats ADD COLUMN changes TEXT NOT NULL DEFAULT 'ask';  -- or 'allow'
ALTER TABLE chats ADD COLUMN ask_outside TEXT NOT NULL DEFAULT '[]';  -- JSON: directories
