-- Version 5: the mark that the store shares with its data directory, and directories to remove.

-- The data directory has the same id and the last generation in a file: see marks.py.
CREATE TABLE store_mark (
    only_row   INTEGER PRIMARY KEY CHECK (only_row = 1),
    id         TEXT NOT NULL,
    generation INTEGER NOT NULL                 -- rises with each start and each clean end
);

-- Directories that a caller deleted, until they are removed. A directory that no row names is kept.
CREATE TABLE removals (
    directory    TEXT NOT NULL,
    conversation TEXT NOT NULL DEFAULT '',      -- '': the whole directory of the cargo
    PRIMARY KEY (directory, conversation)
) WITHOUT ROWID;
