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
KEPT_DIRECTORY = "files store backup directory"
ROWS_DIRECTORY = "store backup directory"


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
    "restore an older backup": "`sbx store backup`, its deletion, then `sbx store restore`.",
    "forget the user": "`sbx forget USER`.",
}

THINGS = {
    "sandbox": Thing(
        "Sandbox",
        "A sandbox that a program created with `sbx.client` or `Sandbox(connect=…)`: its "
        "variables of the environment, its runs and its files.",
        {
            "create": Cell("ok, then idle", "sandbox.create", ROWS),
            "use": Cell("ok, then ready", "", KEPT),
            "idle": Cell("idle", "", KEPT, "The kernel ends, and its variables are lost."),
            "expire": Cell(
                "expired",
                "",
                KEPT,
                "The files stay until `files_grace` is over, but no call returns them.",
            ),
            "restore": Cell("Conflict, then expired", "", KEPT, "Only a session can be restored."),
            "grace over": Cell("NotFound not_found", "", "nowhere"),
            "stop": Cell("ok, then idle", "sandbox.stop", KEPT),
            "extend": Cell("ok, then ready", "sandbox.extend", KEPT),
            "delete": Cell("ok, then NotFound not_found", "sandbox.delete", "nowhere"),
            "delete while it runs": Cell(
                "ok, then the code ends: interrupted, then NotFound not_found",
                "sandbox.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("idle", "", KEPT, "The kernel ends with the service."),
            "backup and restore": Cell("idle", "", KEPT),
            "restore an older backup": Cell("idle", "", ROWS, "Its files are gone."),
            "forget the user": Never("it belongs to an owner, and to no user"),
        },
    ),
    "session": Thing(
        "Session",
        "The sandbox of a user with an agent, with all its conversations.",
        {
            "create": Cell("201, then 200 running", "session.create", ROWS),
            "use": Cell("200 ok, then 200 running", "", KEPT),
            "idle": Cell("200 running", "", KEPT, "The kernels end, and their variables are lost."),
            "expire": Cell(
                "200 error", "", KEPT, "The next request for the session finds its files."
            ),
            "restore": Cell("201 restored, then 200 running", "session.create", KEPT),
            "grace over": Cell(
                "404 not_found", "", "nowhere", "Messages of its conversations stay: see the chat."
            ),
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
            "restore an older backup": Cell("200 running", "", ROWS, "Its files are gone."),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "conversation": Thing(
        "Conversation",
        "The workspace of a conversation in a session, and the history of its runs.",
        {
            "create": Cell(
                "200 ok, then 200 listed", "", KEPT, "The first run, upload or file creates it."
            ),
            "use": Cell("200 ok, then 200 listed", "", KEPT),
            "idle": Cell("200 listed", "", KEPT),
            "expire": Cell("200 listed", "", KEPT),
            "restore": Cell("201 restored, then 200 listed", "session.create", KEPT),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200 listed", "session.stop", KEPT),
            "extend": Cell("200, then 200 listed", "session.extend", KEPT),
            "delete": Cell("204, then 200 not listed", "conversation.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted ConversationDeleted, then 200 not listed",
                "conversation.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200 listed", "", KEPT),
            "backup and restore": Cell("200 listed", "", KEPT),
            "restore an older backup": Cell("200 listed", "", ROWS, "Its files are gone."),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "context": Thing(
        "Context",
        "A second kernel of a conversation, by its name. Its variables are in memory only.",
        {
            "create": Cell("201, then 200 ready", "context.create", ROWS),
            "use": Cell("200 ok, then 200 ready", "", ROWS),
            "idle": Cell("200 idle", "", ROWS, "Its variables are lost."),
            "expire": Cell("409 sandbox_expired", "", ROWS),
            "restore": Cell("201 restored, then 200 idle", "session.create", ROWS),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200 idle", "session.stop", ROWS),
            "extend": Cell("200, then 200 ready", "session.extend", ROWS),
            "delete": Cell(
                "204, then 404 not_found",
                "context.delete",
                "nowhere",
                "The history of its runs goes with it.",
            ),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted ContextDeleted, then 404 not_found",
                "context.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200 idle", "", ROWS),
            "backup and restore": Cell("200 idle", "", ROWS),
            "restore an older backup": Cell("200 idle", "", ROWS),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
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
                "The code continues until it is interrupted.",
            ),
            "kill -9 and restart": Cell("200", "", KEPT),
            "backup and restore": Cell("200", "", KEPT),
            "restore an older backup": Cell(
                "404 file_not_found", "", ROWS, "The store has its name, and no file."
            ),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "file": Thing(
        "File of a workspace",
        "A file that code or a caller wrote.",
        {
            "create": Cell("200, then 200", "file.write", "files"),
            "use": Cell("200 ok, then 200", "", "files"),
            "idle": Cell("200", "", "files"),
            "expire": Cell("409 sandbox_expired", "", "files", "It returns with the session."),
            "restore": Cell("201 restored, then 200", "session.create", "files"),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200", "session.stop", "files"),
            "extend": Cell("200, then 200", "session.extend", "files"),
            "delete": Cell("200, then 404 file_not_found", "file.delete", "nowhere"),
            "delete while it runs": Cell(
                "200, then the code ends: interrupted KeyboardInterrupt, then 404 file_not_found",
                "file.delete",
                "nowhere",
                "The code continues until it is interrupted.",
            ),
            "kill -9 and restart": Cell("200", "", "files"),
            "backup and restore": Cell(
                "200", "", "files", "A backup has no files: they stay where they are."
            ),
            "restore an older backup": Cell("404 file_not_found", "", "nowhere"),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "run": Thing(
        "Run",
        "The record of a run: code, output and notes. It is deleted with its conversation.",
        {
            "create": Cell("200 ok, then 200 ok", "", ROWS),
            "use": Cell("200, then 200 ok", "", ROWS),
            "idle": Cell("200 ok", "", ROWS),
            "expire": Cell("200 ok", "", ROWS),
            "restore": Cell("201 restored, then 200 ok", "session.create", ROWS),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell(
                "200, then 200 ok", "", ROWS, "An interruption changes no run that has ended."
            ),
            "extend": Cell("200, then 200 ok", "session.extend", ROWS),
            "delete": Cell("204, then 404 not_found", "conversation.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted ConversationDeleted, then 404 not_found",
                "conversation.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell(
                "200 ServiceEnded: the service ended while this ran",
                "",
                ROWS,
                "A run that had not ended is recorded as interrupted.",
            ),
            "backup and restore": Cell(
                "200 ServiceEnded: the service ended while this ran", "", ROWS
            ),
            "restore an older backup": Cell("200 ok", "", ROWS),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "command": Thing(
        "Command",
        "A background command, and its output. It is deleted with its conversation.",
        {
            "create": Cell("200, then 200 running", "command.start", "files"),
            "use": Cell("200, then 200 running", "", "files"),
            "idle": Cell(
                "200 killed closed",
                "",
                "files",
                "A command without a client does not put off the idle time-out.",
            ),
            "expire": Cell("409 sandbox_expired", "", "files"),
            "restore": Cell("201 restored, then 200 killed closed", "session.create", "files"),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200 stopped", "command.stop", "files"),
            "extend": Cell("200, then 200 running", "session.extend", "files"),
            "delete": Cell("204, then 404 not_found", "conversation.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: with it, then 404 not_found",
                "conversation.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200 killed closed", "", "files"),
            "backup and restore": Cell("200 killed closed", "", "files"),
            "restore an older backup": Cell("404 not_found", "", "nowhere"),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "terminal": Thing(
        "Terminal",
        "An open terminal. Its screen is in memory only.",
        {
            "create": Cell("201, then 200 running", "terminal.open", "nowhere"),
            "use": Cell("200, then 200 running", "", "nowhere"),
            "idle": Cell("404 not_found", "", "nowhere"),
            "expire": Cell("409 sandbox_expired", "", "nowhere"),
            "restore": Cell("201 restored, then 404 not_found", "session.create", "nowhere"),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 404 not_found", "session.stop", "nowhere"),
            "extend": Cell("200, then 200 running", "session.extend", "nowhere"),
            "delete": Cell("204, then 404 not_found", "terminal.close", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: with it, then 404 not_found", "terminal.close", "nowhere"
            ),
            "kill -9 and restart": Cell("404 not_found", "", "nowhere"),
            "backup and restore": Cell("404 not_found", "", "nowhere"),
            "restore an older backup": Cell("404 not_found", "", "nowhere"),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "grant": Thing(
        "Grant",
        "Access that a person granted for a conversation. It is in memory; the events of the "
        "sandbox record it.",
        {
            "create": Cell("201, then 200 valid", "grant.added", ROWS),
            "use": Cell("200 ok, then 200 valid", "", ROWS),
            "idle": Cell(
                "200 ended",
                "grant.ended",
                ROWS,
                "It ends with the kernels: a person is asked again.",
            ),
            "expire": Cell("409 sandbox_expired", "grant.ended", ROWS),
            "restore": Cell("201 restored, then 200 ended", "grant.ended session.create", ROWS),
            "grace over": Cell("404 not_found", "grant.ended", "nowhere"),
            "stop": Cell("200, then 200 ended", "grant.ended session.stop", ROWS),
            "extend": Cell("200, then 200 valid", "session.extend", ROWS),
            "delete": Cell(
                "204, then 200 ended",
                "grant.ended grant.revoke",
                ROWS,
                "The events of the sandbox keep the record.",
            ),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted KeyboardInterrupt, then 200 ended",
                "grant.ended grant.revoke",
                ROWS,
            ),
            "kill -9 and restart": Cell("200 ended", "", ROWS),
            "backup and restore": Cell("200 ended", "", ROWS),
            "restore an older backup": Cell("200 ended", "", ROWS),
            "forget the user": Cell(
                "200, then 404 not_found", "grant.ended user.forget", "nowhere"
            ),
        },
    ),
    "token": Thing(
        "Token",
        "A signed token. sbx keeps its id, bounds and end, but not its text.",
        {
            "create": Cell("201, then 200", "token.create", "nowhere"),
            "use": Cell("201, then 200", "upload.put", "nowhere"),
            "idle": Cell("200", "", "nowhere"),
            "expire": Cell("401 unauthorized", "", "nowhere"),
            "restore": Cell("201 restored, then 200", "session.create", "nowhere"),
            "grace over": Cell("401 unauthorized", "", "nowhere"),
            "stop": Cell("200, then 200", "session.stop", "nowhere"),
            "extend": Cell(
                "200, then 200", "session.extend", "nowhere", "The end of the token stays."
            ),
            "delete": Cell("204, then 401 unauthorized", "token.revoke", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted KeyboardInterrupt, then 401 unauthorized",
                "token.revoke",
                "nowhere",
                "Code that was started with it continues.",
            ),
            "kill -9 and restart": Cell("200", "", "nowhere"),
            "backup and restore": Cell(
                "200", "", "nowhere", "A backup from before a revocation would make it valid again."
            ),
            "restore an older backup": Cell(
                "200", "", "nowhere", "It is valid until its end: revoke it again."
            ),
            "forget the user": Cell("200, then 401 unauthorized", "user.forget", "nowhere"),
        },
    ),
    "link": Thing(
        "Link",
        "A signed link to a port. sbx does not keep its text. It ends with its session, and "
        "with the key or token that made it.",
        {
            "create": Cell("201, then 200", "port.link", "nowhere"),
            "use": Cell("200, then 200", "", "nowhere"),
            "idle": Cell(
                "502 port_not_open",
                "",
                "nowhere",
                "The link is valid, but the server has ended with the kernel.",
            ),
            "expire": Cell("409 sandbox_expired", "", "nowhere"),
            "restore": Cell("201 restored, then 502 port_not_open", "session.create", "nowhere"),
            "grace over": Cell("401 unauthorized", "", "nowhere"),
            "stop": Cell("200, then 502 port_not_open", "session.stop", "nowhere"),
            "extend": Cell("200, then 200", "session.extend", "nowhere"),
            "delete": Cell("204, then 404 not_found", "session.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted SandboxDeleted, then 404 not_found",
                "session.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("502 port_not_open", "", "nowhere"),
            "backup and restore": Cell("502 port_not_open", "", "nowhere"),
            "restore an older backup": Cell(
                "502 port_not_open", "", "nowhere", "It is valid until its end."
            ),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "project": Thing(
        "Project",
        "A project, and its conversations. The directory is the user's: no act changes it.",
        {
            "create": Cell("201, then 200", "project.create", ROWS_DIRECTORY),
            "use": Cell("done, then 200", "session.reuse chat.start upload.put", KEPT_DIRECTORY),
            "idle": Cell("200", "", KEPT_DIRECTORY),
            "expire": Cell("200", "", KEPT_DIRECTORY),
            "restore": Cell("201 restored, then 200", "session.create", KEPT_DIRECTORY),
            "grace over": Cell(
                "200",
                "",
                ROWS_DIRECTORY,
                "The uploads of its conversations end with their session.",
            ),
            "stop": Cell("200, then 200", "session.stop", KEPT_DIRECTORY),
            "extend": Cell("200, then 200", "session.extend", KEPT_DIRECTORY),
            "delete": Cell(
                "204, then 404 not_found",
                "project.delete",
                "directory",
                "Its conversations are deleted, with messages, uploads and runs.",
            ),
            "delete while it runs": Cell(
                "204, then the code ends: aborted, then 404 not_found",
                "project.delete",
                "directory",
            ),
            "kill -9 and restart": Cell("200", "", KEPT_DIRECTORY),
            "backup and restore": Cell("200", "", KEPT_DIRECTORY),
            "restore an older backup": Cell(
                "200", "", ROWS_DIRECTORY, "The uploads of its conversations are gone."
            ),
            "forget the user": Cell(
                "200, then 200",
                "user.forget",
                ROWS_DIRECTORY,
                "It stays: it belongs to its owner. The conversations of the user are gone.",
            ),
        },
    ),
    "chat": Thing(
        "Chat",
        "The messages of a conversation with an agent, and all that the agent did in it.",
        {
            "create": Cell("done, then 200", "session.create chat.start", ROWS),
            "use": Cell("done, then 200", "session.reuse chat.start", KEPT),
            "idle": Cell("200", "", KEPT),
            "expire": Cell("200", "", KEPT),
            "restore": Cell("201 restored, then 200", "session.create", KEPT),
            "grace over": Cell(
                "200", "", ROWS, "Messages stay until the conversation or its session is deleted."
            ),
            "stop": Cell("200, then 200", "session.stop", KEPT),
            "extend": Cell("200, then 200", "session.extend", KEPT),
            "delete": Cell("204, then 404 not_found", "conversation.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: aborted, then 404 not_found",
                "conversation.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell(
                "200", "", KEPT, "The run of the agent is recorded as interrupted."
            ),
            "backup and restore": Cell("200", "", KEPT),
            "restore an older backup": Cell("200", "", ROWS),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "approval": Thing(
        "Approval",
        "A command in a project that waits for a decision. It is deleted with its conversation.",
        {
            "create": Cell(
                "asks, then 200 pending",
                "session.reuse chat.start",
                KEPT,
                "The command was tried on a copy of the files.",
            ),
            "use": Cell(
                "200, then 200 approved",
                "approval.decide",
                KEPT_DIRECTORY,
                "Its changes are made in the directory.",
            ),
            "idle": Cell("200 denied by timeout", "", ROWS),
            "expire": Cell(
                "200 denied by timeout",
                "",
                ROWS,
                "A session does not expire while its agent waits.",
            ),
            "restore": Cell("201 restored, then 200 denied by timeout", "session.create", ROWS),
            "grace over": Cell("200 denied by timeout", "", ROWS),
            "stop": Cell("200, then 200 denied by abort", "session.stop", KEPT),
            "extend": Cell("200, then 200 pending", "session.extend", KEPT),
            "delete": Cell("204, then 404 approval_not_found", "conversation.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: aborted, then 404 approval_not_found",
                "conversation.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200 denied by restart", "", ROWS),
            "backup and restore": Cell("200 denied by restart", "", ROWS),
            "restore an older backup": Cell("200 denied by restart", "", ROWS),
            "forget the user": Cell("200, then 404 approval_not_found", "user.forget", "nowhere"),
        },
    ),
    "rule": Thing(
        "Rule",
        "A remembered decision: a command in a project that is executed without an approval. "
        "It is deleted with its project.",
        {
            "create": Cell(
                "200, then 200 listed", "session.reuse chat.start approval.decide", KEPT_DIRECTORY
            ),
            "use": Cell("done, then 200 listed", "session.reuse chat.start", KEPT_DIRECTORY),
            "idle": Cell("200 listed", "", ROWS_DIRECTORY),
            "expire": Cell("200 listed", "", ROWS_DIRECTORY),
            "restore": Cell("201 restored, then 200 listed", "session.create", ROWS_DIRECTORY),
            "grace over": Cell("200 listed", "", ROWS_DIRECTORY),
            "stop": Cell("200, then 200 listed", "session.stop", KEPT_DIRECTORY),
            "extend": Cell("200, then 200 listed", "session.extend", KEPT_DIRECTORY),
            "delete": Cell(
                "204, then 200 not listed",
                "approval.rule.revoke",
                KEPT_DIRECTORY,
                "The messages of its conversation still name the command.",
            ),
            "delete while it runs": Cell(
                "204, then the code ends: aborted, then 200 not listed",
                "approval.rule.revoke chat.abort",
                ROWS_DIRECTORY,
            ),
            "kill -9 and restart": Cell("200 listed", "", ROWS_DIRECTORY),
            "backup and restore": Cell("200 listed", "", ROWS_DIRECTORY),
            "restore an older backup": Cell("200 listed", "", ROWS_DIRECTORY, "Revoke it again."),
            "forget the user": Cell(
                "200, then 200 listed", "user.forget", ROWS_DIRECTORY, "It stays with its project."
            ),
        },
    ),
    "quarantine item": Thing(
        "Item of the quarantine",
        "A file of a project that a program of the host would obey.",
        {
            "create": Cell("done, then 200", "session.reuse chat.start", "files"),
            "use": Cell("200, then 200", "", "files"),
            "idle": Cell("200", "", "files"),
            "expire": Cell("200", "", "files"),
            "restore": Cell("201 restored, then 200", "session.create", "files"),
            "grace over": Cell("200", "", "files", "It stays until a person restores or drops it."),
            "stop": Cell("200, then 200", "session.stop", "files"),
            "extend": Cell("200, then 200", "session.extend", "files"),
            "delete": Cell("204, then 404 item_not_found", "quarantine.drop", "nowhere"),
            "delete while it runs": Cell(
                "409 quarantine_in_use, then 200",
                "",
                "files",
                "While its sandbox is open, a program in it may use the item.",
            ),
            "kill -9 and restart": Cell("200", "", "files"),
            "backup and restore": Cell("200", "", "files"),
            "restore an older backup": Never("a backup has neither its file nor a row of it"),
            "forget the user": Cell(
                "200, then 200",
                "user.forget",
                "files",
                "It stays: it belongs to the directory of the project.",
            ),
        },
    ),
    "sub-agent": Thing(
        "Sub-agent",
        "The sandbox of a sub-agent. It is deleted when the sub-agent has ended.",
        {
            "create": Cell("done, then 200 done", "session.reuse chat.start", "nowhere"),
            "use": Cell("done, then 200 done", "session.reuse chat.start", "nowhere"),
            "idle": Cell("200 done", "", "nowhere"),
            "expire": Cell("200 done", "", "nowhere"),
            "restore": Cell("201 restored, then 200 done", "session.create", "nowhere"),
            "grace over": Cell("200 done", "", "nowhere"),
            "stop": Cell("200, then 200 aborted", "session.stop", "nowhere"),
            "extend": Cell("200, then 200 done", "session.extend", "nowhere"),
            "delete": Cell("204, then 404 not_found", "conversation.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: aborted, then 404 not_found",
                "conversation.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell(
                "200 interrupted", "", "nowhere", "The next start of an agent deletes the sandbox."
            ),
            "backup and restore": Cell("200 interrupted", "", "nowhere"),
            "restore an older backup": Cell("200 done", "", "nowhere"),
            "forget the user": Cell("200, then 404 not_found", "user.forget", "nowhere"),
        },
    ),
    "workspace": Thing(
        "Workspace",
        "A workspace that was created separately (`/v1/cargos`), and that sandboxes use.",
        {
            "create": Cell("201, then 200", "cargo.create", "nowhere", "It is empty."),
            "use": Cell("200, then 200", "sandbox.create file.write", "files"),
            "idle": Cell("200", "", "files"),
            "expire": Cell("200", "", "files", "It has no end; only the sandbox expires."),
            "restore": Cell("409 sandbox_expired, then 200", "", "files"),
            "grace over": Cell("200", "", "files"),
            "stop": Cell("200, then 200", "sandbox.stop", "files"),
            "extend": Cell("200, then 200", "sandbox.extend", "files"),
            "delete": Cell("204, then 404 not_found", "cargo.delete", "nowhere"),
            "delete while it runs": Cell(
                "409 conflict, then 200", "", "files", "Delete the sandboxes that use it first."
            ),
            "kill -9 and restart": Cell("200", "", "files"),
            "backup and restore": Cell("200", "", "files"),
            "restore an older backup": Cell("200", "", "nowhere", "It is empty."),
            "forget the user": Never("it belongs to an owner, and to no user"),
        },
    ),
    "Bay sandbox": Thing(
        "Sandbox of Bay",
        "A sandbox of the routes of Bay.",
        {
            "create": Cell("201, then 200 idle", "sandbox.create", ROWS),
            "use": Cell("200 ok, then 200 ready", "", KEPT),
            "idle": Cell("200 idle", "", KEPT),
            "expire": Cell("200 expired", "", KEPT),
            "restore": Cell("409 sandbox_expired, then 200 expired", "", KEPT),
            "grace over": Cell("404 not_found", "", "nowhere"),
            "stop": Cell("200, then 200 idle", "sandbox.stop", KEPT),
            "extend": Cell("200, then 200 ready", "sandbox.extend", KEPT),
            "delete": Cell("204, then 404 not_found", "sandbox.delete", "nowhere"),
            "delete while it runs": Cell(
                "204, then the code ends: interrupted, then 404 not_found",
                "sandbox.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("200 idle", "", KEPT),
            "backup and restore": Cell("200 idle", "", KEPT),
            "restore an older backup": Cell("200 idle", "", ROWS, "Its files are gone."),
            "forget the user": Never("it belongs to an owner, and to no user"),
        },
    ),
    "E2B sandbox": Thing(
        "Sandbox of E2B",
        "A sandbox of the SDK of E2B. `stop` is `pause`, `restore` is `connect`.",
        {
            "create": Cell("ok, then running", "sandbox.create", ROWS),
            "use": Cell("ok, then running", "file.write", KEPT),
            "idle": Cell("running", "", KEPT),
            "expire": Cell("SandboxNotFoundException", "", KEPT),
            "restore": Cell("SandboxNotFoundException, then SandboxNotFoundException", "", KEPT),
            "grace over": Cell("SandboxNotFoundException", "", "nowhere"),
            "stop": Cell("ok, then paused", "sandbox.pause", KEPT),
            "extend": Cell("ok, then running", "sandbox.extend", KEPT),
            "delete": Cell("ok, then SandboxNotFoundException", "sandbox.delete", "nowhere"),
            "delete while it runs": Cell(
                "ok, then the code ends: SandboxDeleted, then SandboxNotFoundException",
                "sandbox.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("running", "", KEPT),
            "backup and restore": Cell("running", "", KEPT),
            "restore an older backup": Cell("running", "", ROWS, "Its files are gone."),
            "forget the user": Never("it belongs to an owner, and to no user"),
        },
    ),
    "OpenSandbox sandbox": Thing(
        "Sandbox of OpenSandbox",
        "A sandbox of the SDK of OpenSandbox. `stop` is `pause`, `restore` is `resume`.",
        {
            "create": Cell("ok, then Running", "sandbox.create", ROWS),
            "use": Cell("ok, then Running", "file.write", KEPT),
            "idle": Cell("Running", "", KEPT),
            "expire": Cell("SandboxApiException", "", KEPT),
            "restore": Cell("SandboxApiException, then SandboxApiException", "", KEPT),
            "grace over": Cell("SandboxApiException", "", "nowhere"),
            "stop": Cell("ok, then Paused", "sandbox.pause", KEPT),
            "extend": Cell("ok, then Running", "sandbox.extend", KEPT),
            "delete": Cell("ok, then SandboxApiException", "sandbox.delete", "nowhere"),
            "delete while it runs": Cell(
                "ok, then the code ends: CommandExecError, then SandboxApiException",
                "sandbox.delete",
                "nowhere",
            ),
            "kill -9 and restart": Cell("Running", "", KEPT),
            "backup and restore": Cell("Running", "", KEPT),
            "restore an older backup": Cell("Running", "", ROWS, "Its files are gone."),
            "forget the user": Never("it belongs to an owner, and to no user"),
        },
    ),
    "notebook kernel": Thing(
        "Kernel of a notebook",
        "A kernel of Jupyter. Its workspace is the directory of the notebook, which is the "
        "user's: no act changes it.",
        {
            "create": Cell("starts, then alive", "", "nowhere"),
            "use": Cell("ok, then alive", "", "directory"),
            "idle": Never("a kernel of Jupyter has no idle time-out of sbx"),
            "expire": Never("a kernel of Jupyter has no lifetime"),
            "restore": Never("without a lifetime nothing is restored"),
            "grace over": Never("without a lifetime nothing is kept for a while"),
            "stop": Cell("interrupted, then alive", "", "directory"),
            "extend": Never("without a lifetime nothing is extended"),
            "delete": Cell("shut down, then dead", "", "directory"),
            "delete while it runs": Cell("shut down, then dead", "", "directory"),
            "kill -9 and restart": Cell(
                "alive", "", "directory", "Jupyter starts another kernel; variables are lost."
            ),
            "backup and restore": Never("it needs no service, so the store does not have it"),
            "restore an older backup": Never("it needs no service, so the store does not have it"),
            "forget the user": Never("it belongs to no user of a service"),
        },
    ),
}
TABLE = {name: thing.cells for name, thing in THINGS.items()}

_HEAD = """# What happens to your data

Each thing that sbx keeps, and what each act does to it. This page is generated from a table. The
tests do every act of the table over its real route, and then search every place for the name and
the content of the thing.

The places are the **files** below the data directory, the **store** (all bytes of the SQLite file
and of its log), a **backup** of the store that is made afterwards, and the **directory** of a
project or a notebook, which is yours. "nowhere" means that no byte of the thing is left in any of
them.

- A deletion is final at once. No route, restart or session brings the data back.
- **Ids stay for a while.** A deleted sandbox or session leaves its id, its user and agent, and the
  times and the cause of its end for `tombstones_kept` (30 days). The events of a sandbox name
  conversations and contexts.
- **The audit log is never changed.** Its lines name callers, ids, paths and commands, but no
  content of files and no output. The start of a kernel adds `kernel.start`, which the tables leave
  out.
- **An old backup has what the store had then**, also the rows of things that were deleted later.
  After `sbx store restore` they are listed again, with messages, code and outputs of runs. A backup
  has no files: deleted files do not come back. Delete old backups to be rid of their rows. A token
  that was revoked after the backup is valid again until its end. `sbx store restore` keeps the
  store before it as `store-TIME.sqlite` in the data directory; delete that file, too.
- A kernel that ends loses its variables. Files stay.
"""


def cell_of(thing: str, act: str) -> Cell:
    """Return a cell that acts."""
    cell = TABLE[thing][act]
    assert isinstance(cell, Cell)
    return cell


def page() -> str:
    """Return the page of the documentation."""
    return "\n".join([_HEAD, *_acts(), *_overview(), *_details()])


def _acts() -> Iterator[str]:
    yield "## The acts\n"
    yield "| act | what happens |"
    yield "|---|---|"
    for act, text in ACTS.items():
        yield f"| {act} | {text} |"
    yield ""


def _overview() -> Iterator[str]:
    yield "## The content afterwards\n"
    yield f"| thing | {' | '.join(ACTS)} |"
    yield "|---" * (len(ACTS) + 1) + "|"
    for thing in THINGS.values():
        words = [_word(thing.cells[act]) for act in ACTS]
        yield f"| {thing.title} | {' | '.join(words)} |"
    yield ""


def _word(cell: Cell | Never) -> str:
    if isinstance(cell, Never):
        return "-"
    if cell.disk == "nowhere":
        return "nowhere"
    return "yours" if cell.disk == "directory" else "kept"


def _details() -> Iterator[str]:
    for thing in THINGS.values():
        yield f"## {thing.title}\n\n{thing.about}\n"
        yield "| act | answers | audit log | content in | |"
        yield "|---|---|---|---|---|"
        for act in ACTS:
            cell = thing.cells[act]
            if isinstance(cell, Never):
                yield f"| {act} | - | - | - | It cannot happen: {cell.reason}. |"
            else:
                log = " ".join(f"`{event}`" for event in cell.log.split())
                places = ", ".join(cell.disk.split())
                yield f"| {act} | {cell.answer} | {log} | {places} | {cell.note} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
