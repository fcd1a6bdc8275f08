"""The data types between callers and sandboxes: the same embedded, over HTTP and in the client.

    runs.py       a run: its events while it is live, and one result at its end
    events.py     events and results as JSON, and back
    files.py      entries of a workspace, uploads
    mounts.py     directories of the host that are mounted to a live sandbox
    receipt.py    the walls in force around a kernel
    addresses.py  the default address of a service
    approvals.py  a user's yes or no to a tool call, and remembered decisions
    invisible.py  characters that a reader cannot see

Imports the standard library and sbx.errors only.
"""
