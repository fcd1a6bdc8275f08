"""/opensandbox: the API that the packages of OpenSandbox speak.

    sandboxes.py   the lifecycle plane, /opensandbox/v1: a sandbox, its endpoints, its pause
    execd.py       the base of the other plane, at the endpoint of port 44772: ping, metrics
    commands.py    commands, background commands, sessions of bash
    files.py       files at any path inside
    code.py        the code interpreter and its contexts
    stream.py      the events of a run as this SDK reads them

The API key is in OPEN-SANDBOX-API-KEY. For the other plane the SDK sends no key, but the headers of
the endpoint, which have a link (sbx/service/links.py). Only this folder uses OpenSandbox's words.
Every error body is {"code", "message"}.
"""

from sbx.api.opensandbox import code, commands, execd, files, sandboxes

routers = (
    commands.router,
    code.router,
    files.router,
    execd.router,
    execd.egress_router,
    execd.ports_router,
    sandboxes.router,
)

__all__ = ["routers"]
