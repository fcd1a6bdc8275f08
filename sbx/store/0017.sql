-- Version 17: projects that ask before each command.

ALTER TABLE projects ADD COLUMN ask_commands INTEGER NOT NULL DEFAULT 0;
