"""Copies of a conversation's files: dry runs, checkpoints and their changes.

snapshots     copies, compares and commits
working_copy  a copy with a kernel of its own
dry_run       a working copy whose changes are applied or dropped; dry_run_view describes one
checkpoints   copies to return to
"""
