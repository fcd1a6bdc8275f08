"""/v1: the HTTP surface of Bay, so that clients that were written for it work unchanged.

    models.py       its bodies, and their conversion from the values of the runtime
    sandboxes.py    sandboxes: create, list, stop, extend, delete, and their events
    runs.py         python/exec, shell/exec, interrupt, following a run
    files.py        filesystem/*
    history.py      the history of runs
    cargos.py       workspaces that exist independently of a sandbox
    admin.py        profiles, collection
    idempotency.py  Idempotency-Key

A profile of Bay is a policy. All requests use the conversation `default`.
"""

from sbx.api.v1.bay import admin, cargos, files, history, runs, sandboxes

routers = tuple(part.router for part in (runs, sandboxes, files, history, cargos, admin))

__all__ = ["routers", "runs"]
