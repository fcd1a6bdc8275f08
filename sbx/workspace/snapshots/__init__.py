"""Copies of a workspace, the differences between two, and how a change is applied or taken back.

scan             what a tree contains: one record for each file
manifest         the changes between two scans
copy             copies a tree, and shares blocks where the file system can
diff             describes changes as text
apply            applies changes to a tree
journal, journal_records  what was done so far, on disk
staging          the directory that holds the old and the new files meanwhile
recover, rollback         takes a half applied change back after a crash
"""
