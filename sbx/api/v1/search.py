"""Files of any conversation found by their names and by what is in them."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.v1.files import ListingBody, Path, conversation_lease, entry_body
from sbx.protocol.files import Kind
from sbx.workspace.files import RESULTS_MAX

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}", tags=["native"]
)
_ERRORS = documented(404, 409, 429)
Pattern = Annotated[str, Query()]
Most = Annotated[int, Query(description=f"at most {RESULTS_MAX}")]


class MatchBody(BaseModel):
    """A line that matched: `line` and `column` count from 1, `text` is its beginning."""

    path: str
    line: int
    column: int
    text: str


class MatchesBody(BaseModel):
    """`complete` is false where a limit cut the search; `files` were read, `skipped` were not."""

    matches: list[MatchBody]
    complete: bool
    files: int
    skipped: int


@router.get("/find", responses=_ERRORS)
async def find(
    sandbox_id: str,
    conversation: str,
    pattern: Pattern,
    caller: CallerDep,
    service: ServiceDep,
    path: Path = ".",
    kind: Kind | None = None,
    max_results: Most = 1000,
) -> ListingBody:
    """What lies below a directory and has a name, or a path, like the glob `pattern`."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:read") as (
        talk,
        _,
    ):
        found = await talk.files.find(pattern, path, kind=kind, max_results=max_results)
    return ListingBody(entries=[entry_body(one) for one in found], complete=found.complete)


@router.get("/grep", responses=_ERRORS)
async def grep(
    sandbox_id: str,
    conversation: str,
    pattern: Pattern,
    caller: CallerDep,
    service: ServiceDep,
    path: Path = ".",
    regex: bool = False,
    ignore_case: bool = False,
    include: str | None = None,
    max_matches: Most = 1000,
) -> MatchesBody:
    """The lines of text files that have `pattern`: plain text, or an expression of RE2's."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:read") as (
        talk,
        _,
    ):
        found = await talk.files.grep(
            pattern,
            path,
            regex=regex,
            ignore_case=ignore_case,
            include=include,
            max_matches=max_matches,
        )
    return MatchesBody(
        matches=[MatchBody(**asdict(one)) for one in found],
        complete=found.complete,
        files=found.files,
        skipped=found.skipped,
    )
