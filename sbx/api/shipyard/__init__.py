"""/shipyard: the API that the package `shipyard-python-sdk` speaks.

A ship is a sandbox, a session of it a conversation: each session has its own files and kernel.

    ships.py       which ship a session gets, and the sessions of a ship
    routes.py      the life of a ship, files up and down
    operations.py  exec: commands, Python and files of one session

Only this folder uses Shipyard's words. Every error body is {"detail": text}.
"""

from sbx.api.shipyard import routes

routers = (routes.router,)

__all__ = ["routers"]
