"""The API that the packages of E2B speak. Its routes are below /e2b; the SDK asks for them at the
root of the service, and `e2b_path` adds the prefix.

    sandboxes.py    the control plane: create, connect, list, pause, kill, metrics
    target.py       the sandbox of a request on the other planes; ports of user servers
    connect.py      the Connect protocol, in JSON
    processes.py    process.Process: commands and terminals
    filesystem.py   filesystem.Filesystem: the tree, and watches
    files.py        /files: contents, also at signed addresses
    paths.py        /home/user, which is a name of /workspace
    code.py         /execute and /contexts: the code interpreter

The API key is in X-API-KEY. On the other planes the SDK sends the token of the sandbox, which is a
link (sbx/service/links.py). Only this folder uses E2B's words.
"""

from sbx.api.e2b import code, files, filesystem, processes, sandboxes, target

routers = (
    code.router,
    processes.router,
    filesystem.router,
    files.router,
    target.router,
    sandboxes.router,
)

__all__ = ["routers"]
