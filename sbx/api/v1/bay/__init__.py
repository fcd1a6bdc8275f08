"""/v1: the surface of Bay over our runtime, so that clients written for it work unchanged.

    models.py       its bodies, and how the runtime's values become them
    sandboxes.py    sandboxes and their life, and the events that tell it
    runs.py         python/exec, shell/exec, interrupt, following a run
    files.py        filesystem/*
    history.py      what was run
    cargos.py       workspaces that outlive a sandbox
    admin.py        profiles, collection
    idempotency.py  Idempotency-Key

A profile of Bay is a policy of ours, and everything happens in the conversation `default`.
"""

from sbx.api.v1.bay import admin, cargos, files, history, runs, sandboxes

routers = tuple(part.router for part in (runs, sandboxes, files, history, cargos, admin))

__all__ = ["routers", "runs"]
