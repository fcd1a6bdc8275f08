"""/v1 beyond Bay: what our client needs so that a remote sandbox works like an embedded one.

runs                    runs of a conversation, their input and their interrupt
commands                background commands, and the standard input of runs
usage                   the usage of a live sandbox
lifecycle               start, stop and receipt of a conversation; inspect
contexts                contexts of a conversation: kernels over the same files
terminals               terminals of a conversation, and a WebSocket to each
files                   files and uploads of a conversation, as raw bytes
search, arrange, watch  find, change and follow files
snapshots               dry runs, and checkpoints to restore
archive, uploads        directories as archives; resumable uploads
mounts                  directories of the host in a live sandbox, for operators
admin                   keys, tokens and the sandboxes of all owners, for operators
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
