"""JSON bodies that several surfaces share, and how a route reads a body by itself.

FastAPI reads and parses the body of a route before it asks for the caller. A large body would then
occupy memory for a client without a key.
"""

from typing import Any, Literal, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class OkBody(BaseModel):
    status: Literal["ok"] = "ok"


class NotRecorded(BaseModel):
    """The revocation is in force, and the store does not have it yet. The service retries until it
    does. If the service is killed before that, the revocation is lost at the next start."""

    recorded: Literal[False] = False


REVOKED: dict[int | str, dict[str, Any]] = {
    200: {"model": NotRecorded, "description": "Revoked, and not recorded yet"},
    204: {"description": "Revoked"},
}


def revoked(recorded: bool) -> Response:
    """Return the reply to a revocation, which is in force in either case."""
    if recorded:
        return Response(status_code=204)
    content = NotRecorded().model_dump_json()
    return Response(content, status_code=200, media_type="application/json")


async def body_of(request: Request, model: type[Model]) -> Model:
    """Return the body as `model`. Raise RequestValidationError, as FastAPI does for a parameter."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        details = [
            {**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)
        ]
        raise RequestValidationError(details) from None


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads `model` by itself."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
