"""JSON bodies that are read by hand: only once it is known who calls, and parsed only once.

FastAPI reads and parses the body of a route before it asks for the caller, so a large one would be
held in memory for anybody.
"""

from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


async def body_of(request: Request, model: type[Model]) -> Model:
    """The body as `model`. Raises RequestValidationError, as FastAPI does for a parameter."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(found) from None


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra=` of a route that reads `model` so."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
