"""Requests that only look, of clients and of the survey."""

import hashlib
from dataclasses import dataclass
from typing import Any

import httpx

from bench.torture.ledger import Act
from bench.torture.wire import Wire


@dataclass(frozen=True, slots=True)
class Credential:
    """A key or a token, and how it is revoked."""

    id: str
    text: str
    path: str


async def read_file(wire: Wire, box: str, path: str, *, native: bool = True) -> Act:
    """Read a file; the content of the act is its digest."""
    top = f"/v1/sandboxes/{box}"
    place = f"{top}/conversations/default/files" if native else f"{top}/filesystem/download"
    return await wire.call(
        "file.read",
        f"{box}/{path}",
        "GET",
        place,
        seen=lambda reply: hashlib.sha256(reply.content).hexdigest(),
        params={"path": path},
    )


async def counters(wire: Wire, target: str, place: str) -> Act:
    """How often the code of each run was executed; 404 where no counter is. `place` is the path of
    the conversation."""
    return await wire.call(
        "counters",
        target,
        "GET",
        f"/v1/sandboxes/{place}/list",
        seen=lambda reply: {entry["name"]: entry["size"] for entry in reply.json()["entries"]},
        params={"path": "c"},
    )


async def history(wire: Wire, box: str) -> Act:
    """Return the results of all runs of a sandbox that ended."""

    def seen(reply: httpx.Response) -> Any:
        rows = reply.json()["entries"]
        return {row["id"]: {"success": row["success"], "output": row["output"]} for row in rows}

    path, page = f"/v1/sandboxes/{box}/history", {"limit": 500}
    return await wire.call("history", box, "GET", path, seen=seen, params=page)


async def use(wire: Wire, credential: Credential) -> Act:
    """Ask something that takes a valid key or token."""
    headers = {"authorization": f"Bearer {credential.text}"}
    path = "/v1/sandboxes"
    return await wire.call("credential.use", credential.id, "GET", path, headers=headers)
