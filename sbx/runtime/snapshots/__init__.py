"""Copies of a conversation's files: dry runs, checkpoints and their changes.

snapshots     copies, compares and commits; changes describes the difference
working_copy  a copy with a separate kernel
dry_run       a copy whose changes are applied or dropped; dry_run_view describes one
checkpoints   copies to return to
"""
