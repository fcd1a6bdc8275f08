"""Copies of a workspace, the differences between two trees, and commits of changes to a tree.

scan             what a tree contains: one record for each file
manifest         the changes between two scans
copy             copies a tree, and shares blocks where the file system can
diff             describes changes as text
apply            applies changes to a tree
journal          the intents of a commit, on disk before its first step
journal_records  the step for each path
staging          the directory that contains the old and the new files during a commit
recover          undoes a commit after an error or a kill
mirror           keeps a copy of a tree up to date for many uses
"""
