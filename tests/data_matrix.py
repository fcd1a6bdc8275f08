"""What happens to each thing by each act: the only table of it.

The page docs/your-data.md is generated from it, by `python -m tests.data_matrix`. The modules
tests/integration/test_matrix_*.py do each act over its real route and compare everything with the
cell. Each thing has a marker in its names and its content, and all places are searched for it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "your-data.md"
NEVER_MAX = 60
KEPT = "files store backup"
ROWS = "store backup"


class Cell(NamedTuple):
    """`answer`: of the act, then of a request for the thing. `log`: new events of the audit log.
    `disk`: the places that have a name or the content of the thing afterwards, else "nowhere"."""

    answer: str
    log: str
    disk: str
    note: str = ""


class Never(NamedTuple):
    """The act cannot happen to the thing."""

    reason: str


class Thing(NamedTuple):
    title: str
    about: str
    cells: dict[str, Cell | Never]


ACTS = {
    "create": "It is created.",
    "use": "It is used once.",
    "idle": "`idle_timeout` passes without a use of its sandbox.",
    "expire": "The lifetime of its session or sandbox ends, or its own.",
    "restore": "The session is requested again within `files_grace` after its expiry.",
    "grace over": "`files_grace` passes after the expiry.",
    "stop": "It is stopped, or its session is.",
    "extend": "Its lifetime is extended, or that of its session.",
    "delete": "It is deleted by its own route.",
    "delete while it runs": "The same while code runs in it.",
    "kill -9 and restart": "The process of the service is killed, and started again.",
    "backup and restore": "`sbx store backup`, and `sbx store restore` of this file.",
}

THINGS = {
    "sandbox": Thing(
        "Sandbox",
        "A sandbox of `/v1` with a lifetime, its variables of the environment, its runs and files.",
        {
            "create": Cell("201, then 200 idle", "sandbox.create", ROWS),
            "use": Cell("200 ok, then 200 ready", "", KEPT),
            "idle": Cell("200 idle", "", KEPT, "The kernel ends; variables are lost."),
            "expire": Cell(
                "404 not_found", "", "nowhere", "It ends for good: only sessions are restored."
            ),
            "restore": Never("only a session has an id under which it is requested again"),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200 idle", "sandbox.stop", KEPT),
            "extend": Cell("200, then 200 ready", "sandbox.extend", KEPT),
            "delete": Cell("204, then 404 not_found", "sandbox.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted, then 404 not_found",
                "sandbox.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200 idle", "", KEPT, "The kernel is lost."),
            "backup and restore": Cell("200 idle", "", KEPT),
        },
    ),
    "session": Thing(
        "Session",
        "The sandbox of a user with an agent, with all conversations in it.",
        {
            "create": Cell("201, then 200 running", "session.create", ROWS),
            "use": Cell("200 ok, then 200 running", "", KEPT),
            "idle": Cell("200 running", "", KEPT, "The kernel ends; variables are lost."),
            "expire": Cell("200 error", "", KEPT, "The files wait for `files_grace`."),
            "restore": Cell("201 restored, then 200 running", "session.create", KEPT),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200 stopped", "session.stop", KEPT),
            "extend": Cell("200, then 200 running", "session.extend", KEPT),
            "delete": Cell("204, then 404 not_found", "session.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted SandboxDeleted, then 404 not_found",
                "session.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200 running", "", KEPT),
            "backup and restore": Cell("200 running", "", KEPT),
        },
    ),
    "conversation": Thing(
        "Conversation",
        "The workspace of a conversation, with the history of its runs.",
        {
            "create": Cell("200 ok, then 200", "", KEPT),
            "use": Cell("200 ok, then 200", "", KEPT),
            "idle": Cell("200", "", KEPT),
            "expire": Cell("200", "", KEPT),
            "restore": Cell("201 restored, then 200", "session.create", KEPT),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200", "session.stop", KEPT),
            "extend": Cell("200, then 200", "session.extend", KEPT),
            "delete": Cell("204, then 404 not_found", "conversation.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted ConversationDeleted, then 404 not_found",
                "conversation.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200", "", KEPT),
            "backup and restore": Cell("200", "", KEPT),
        },
    ),
    "upload": Thing(
        "Upload",
        "A file that a user put into a conversation.",
        {
            "create": Cell("201, then 200", "upload.put", KEPT),
            "use": Cell("200 ok, then 200", "", KEPT),
            "idle": Cell("200", "", KEPT),
            "expire": Cell(
                "200", "", KEPT, "It can be listed and downloaded until `files_grace` is over."
            ),
            "restore": Cell("201 restored, then 200", "session.create", KEPT),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200", "session.stop", KEPT),
            "extend": Cell("200, then 200", "session.extend", KEPT),
            "delete": Cell("204, then 404 file_not_found", "upload.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted KeyboardInterrupt, then 404 file_not_found",
                "upload.delete",
                "nowhere",
                "The code continues, until the test interrupts it.",
            ),
            "kill -9 and restart": Cell("200", "", KEPT),
            "backup and restore": Cell("200", "", KEPT),
        },
    ),
}
for _name in (
    "context",
    "file",
    "run",
    "command",
    "terminal",
    "grant",
    "token",
    "link",
    "project",
    "chat",
    "approval",
    "rule",
    "quarantine item",
    "sub-agent",
):
    THINGS[_name] = Thing("", "", {act: Cell("?", "?", "") for act in ACTS})
TABLE = {name: thing.cells for name, thing in THINGS.items()}

_HEAD = """# What happens to your data

Each thing that sbx keeps, and the effect of each act on it. This page is generated from the table with
which the tests do every act and then search every place on the disk for the data.

"""


def cell_of(thing: str, act: str) -> Cell:
    """Return a cell that acts."""
    cell = TABLE[thing][act]
    assert isinstance(cell, Cell)
    return cell


def page() -> str:
    """Return the page of the documentation."""
    return _HEAD + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for thing in THINGS.values():
        yield f"## {thing.title}"


if __name__ == "__main__":
    PAGE.write_text(page())
