"""The history of runs in a sandbox, with notes of people and programs."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented, iso
from sbx.api.v1.bay.models import (
    Annotation,
    HistoryEntry,
    HistoryList,
    execution_id,
    python_body,
    run_id_of,
    shell_body,
)
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.events import text_to_json
from sbx.protocol.languages import Language
from sbx.service.history import RunRow

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/history", tags=["history"])

# Bay's browser does not exist here, so its two kinds match nothing.
Kind = Literal["python", "shell", "browser", "browser_batch"] | Language
_NO_RESULT: dict[str, Any] = {"output": None, "error": None}


@router.get("", responses=documented(404))
async def entries(
    sandbox_id: str,
    caller: CallerDep,
    service: ServiceDep,
    exec_type: Kind | None = None,
    success_only: bool = False,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    offset: Annotated[int, Query(ge=0, le=1 << 53)] = 0,
    tags: Annotated[str | None, Query(max_length=4000)] = None,
    has_notes: bool | None = None,
    has_description: bool | None = None,
    conversation: Annotated[str | None, Query(max_length=1000)] = None,
    running: bool = False,
) -> HistoryList:
    """List the ended runs, the last one first; with `running` also those that have not ended. A run
    needs one of the `tags`."""
    rows, total = await service.runs.history.entries(
        caller,
        sandbox_id,
        exec_type=exec_type,
        success_only=success_only,
        limit=limit,
        offset=offset,
        tags=tags,
        has_notes=has_notes,
        has_description=has_description,
        conversation=conversation,
        running=running,
    )
    return HistoryList(entries=[_entry(row) for row in rows], total=total)


@router.get("/last", responses=documented(404))
async def last(
    sandbox_id: str, caller: CallerDep, service: ServiceDep, exec_type: Kind | None = None
) -> HistoryEntry:
    return _entry(await service.runs.history.last(caller, sandbox_id, exec_type=exec_type))


@router.get("/{execution_id}", responses=documented(404))
async def entry(
    sandbox_id: str, execution_id: str, caller: CallerDep, service: ServiceDep
) -> HistoryEntry:
    return _entry(await service.runs.history.entry(caller, sandbox_id, run_id_of(execution_id)))


@router.patch("/{execution_id}", responses=documented(404))
async def annotate(
    sandbox_id: str, execution_id: str, noted: Annotation, caller: CallerDep, service: ServiceDep
) -> HistoryEntry:
    return _entry(
        await service.runs.history.annotate(
            caller,
            sandbox_id,
            run_id_of(execution_id),
            description=noted.description,
            tags=noted.tags,
            notes=noted.notes,
        )
    )


def _entry(row: RunRow) -> HistoryEntry:
    result = _NO_RESULT
    if row.run is not None:
        result = python_body(row.run, None) if row.kind == "python" else shell_body(row.run, None)
    return HistoryEntry(
        id=execution_id(row.id),
        exec_type=row.kind,
        code=text_to_json(row.code),
        success=row.success,
        execution_time_ms=round(row.duration_ms or 0),
        output=result["output"],
        error=result["error"],
        description=row.description,
        tags=row.tags,
        notes=row.notes,
        created_at=iso(row.started_at),
        context=None if row.context == DEFAULT_CONTEXT else row.context,
    )
