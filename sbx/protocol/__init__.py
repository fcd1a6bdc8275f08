"""The words between callers and sandboxes, the same embedded, over HTTP and in the client.

    runs.py       a run, live as events and at its end as one result
    events.py     both as JSON, and back
    files.py      entries of a workspace, uploads
    attachments.py  directories of the host, attached while a sandbox lives
    receipt.py    which walls stand around a kernel
    addresses.py  where a service listens
    approvals.py  a person's yes or no to a tool call, and what is remembered of it
    invisible.py  characters that a person cannot see
    handles.py    what may not be used after a fork

Imports the standard library and sbx.errors only.
"""
