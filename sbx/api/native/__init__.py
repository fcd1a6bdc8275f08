"""/v1 beyond Bay: what our own client needs so that a sandbox over there is like one in here.

runs.py    runs of any conversation, their input and their interrupt
life.py    start, stop and receipt of a conversation; inspect
files.py   files and uploads of any conversation, as raw bytes
admin.py   keys, tokens, and the sandboxes of everybody: the operator's
"""

from fastapi import APIRouter

from sbx.api.native import admin, files, life, runs
from sbx.api.native.runs import ShortCut

router = APIRouter()
for part in (runs, life, files, admin):
    router.include_router(part.router)

__all__ = ["ShortCut", "router"]
