"""The system calls sbx needs, one file per linux facility; mechanisms without any policy.

Standard library only, and nothing of sbx: these files are also mounted inside the jail, where they
run before the seal. Each names its man page, raises OSError with the name of the call in the text,
and says by `supported()` (or its like) whether this linux has the facility at all.
"""
