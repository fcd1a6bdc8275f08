"""/v1: the resources of sbx. `bay/` has the routes and the words of Bay.

runs       runs of a conversation, their input and their interruption
files      files of a conversation: read, write, find, change, watch, archives
uploads    uploads of a conversation, in one request or in pieces
snapshots  dry runs, and checkpoints to restore
contexts   contexts of a conversation: kernels over the same files
commands   background commands
terminals  terminals of a conversation, and a WebSocket to each
lifecycle  start, stop, receipt and grants of a conversation; inspect; the usage of a live sandbox
ports      servers that code started inside, and links to them
admin      for operators: keys, tokens, the sandboxes of all owners, directories of the host in them

`dependencies` has the conversation in the URL.
"""

from sbx.api.v1 import (
    admin,
    commands,
    contexts,
    files,
    lifecycle,
    ports,
    runs,
    snapshots,
    terminals,
    uploads,
)

routers = tuple(
    part.router
    for part in (
        runs,
        files,
        uploads,
        snapshots,
        contexts,
        commands,
        terminals,
        lifecycle,
        ports,
        admin,
    )
)

__all__ = ["routers", "runs"]
