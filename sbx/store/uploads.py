"""The authors and times of uploads. The file on disk is decisive; a row may outlive it, or be
late."""

from msgspec import Struct
from msgspec.structs import astuple

from sbx.store import Store
from sbx.store.pending import PendingWrites


class UploadRow(Struct, frozen=True):
    sandbox_id: str
    conversation: str
    name: str
    size: int
    sha256: str
    uploaded_at: float
    uploaded_by: str


async def put(pending: PendingWrites, row: UploadRow) -> None:
    """Record an upload; the last one of a name counts. The file exists already, so a row that the
    store refuses is written later, unless the conversation was deleted meanwhile."""
    await pending.write(
        _key(row.sandbox_id, row.conversation, row.name),
        lambda on: on.execute(
            "INSERT OR REPLACE INTO uploads (sandbox_id, conversation, name, size, sha256,"
            " uploaded_at, uploaded_by) SELECT ?, ?, ?, ?, ?, ?, ?"
            " WHERE EXISTS (SELECT 1 FROM conversations WHERE sandbox_id = ? AND name = ?)",
            (*astuple(row), row.sandbox_id, row.conversation),
        ),
    )


async def forget(pending: PendingWrites, sandbox_id: str, conversation: str, name: str) -> None:
    """Delete the row of a deleted upload. The rows of a deleted conversation need no call."""
    await pending.write(
        _key(sandbox_id, conversation, name),
        lambda on: on.execute(
            "DELETE FROM uploads WHERE sandbox_id = ? AND conversation = ? AND name = ?",
            (sandbox_id, conversation, name),
        ),
    )


def _key(sandbox_id: str, conversation: str, name: str) -> str:
    return f"upload {sandbox_id} {conversation} {name}"


async def conversations_with(store: Store, sandbox_id: str, name: str) -> list[str]:
    """Return up to 100 conversations with an upload of this name, by name."""
    rows = await store.rows(
        "SELECT conversation FROM uploads JOIN conversations AS c"
        " ON c.sandbox_id = uploads.sandbox_id AND c.name = uploads.conversation"
        " WHERE uploads.sandbox_id = ? AND uploads.name = ? ORDER BY conversation LIMIT 100",
        sandbox_id,
        name,
    )
    return [row["conversation"] for row in rows]
