"""A FastAPI application that runs the code of its users: one sandbox for each user.

uvicorn embed_in_fastapi:app    serves it
python embed_in_fastapi.py      sends two requests without a server
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from sbx import AsyncSandbox, Runtime


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Runtime() as runtime:  # closing it ends every sandbox
        app.state.runtime = runtime
        app.state.sandboxes = {}
        yield


app = FastAPI(lifespan=lifespan)


class Code(BaseModel):
    user: str
    code: str


@app.post("/run")
async def run(request: Code) -> dict[str, str | None]:
    sandboxes: dict[str, AsyncSandbox] = app.state.sandboxes
    if request.user not in sandboxes:
        sandboxes[request.user] = await app.state.runtime.create("default")
    result = await sandboxes[request.user].run(request.code, timeout=10)
    error = result.error.value if result.error is not None else None
    return {"status": result.status.value, "output": result.text, "error": error}


async def main() -> None:
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://app") as http:
        for user, code in [("ann", "x = 6"), ("ann", "x * 7"), ("bob", "x")]:
            reply = await http.post("/run", json={"user": user, "code": code})
            print(user, code, "->", reply.json())


if __name__ == "__main__":
    asyncio.run(main())
