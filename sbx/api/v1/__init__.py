"""/v1 beyond Bay: what our own client needs so that a sandbox over there is like one in here.

runs.py    runs of any conversation, their input and their interrupt
commands.py  background commands, and the standard input of those that are runs
usage.py   what a live sandbox uses
life.py    start, stop and receipt of a conversation; inspect
contexts.py  contexts of a conversation: kernels side by side
terminals.py  terminals of a conversation, and a WebSocket to each
files.py   files and uploads of any conversation, as raw bytes
search.py, arrange.py, watch.py   found by name and content, moved and changed, followed
rehearsals.py   commands on a frozen copy, and files put back
archive.py, partials.py   directories as archives; uploads in pieces
attachments.py  directories of the host, shown inside: the operator's
admin.py   keys, tokens, and the sandboxes of everybody: the operator's
"""

from sbx.api.v1 import (
    admin,
    archive,
    arrange,
    commands,
    contexts,
    files,
    lifecycle,
    mounts,
    runs,
    search,
    snapshots,
    terminals,
    uploads,
    usage,
    watch,
)
from sbx.api.v1.runs import FastRunRoute

routers = (
    runs.router,
    lifecycle.router,
    contexts.router,
    files.router,
    search.router,
    arrange.router,
    snapshots.router,
    watch.router,
    archive.router,
    uploads.router,
    admin.router,
    mounts.router,
    commands.router,
    usage.router,
    terminals.router,
    commands.of_runs,
)

__all__ = ["FastRunRoute", "routers"]
