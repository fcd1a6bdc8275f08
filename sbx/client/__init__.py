"""Sandboxes of a service, from another process: the methods and errors of the embedded API.

    client.py        Client: one service
    sandbox.py       RemoteSandbox, with the methods of AsyncSandbox
    conversation.py  RemoteConversation: runs, life
    commands.py      background commands, by their ids
    usage.py         what a sandbox uses
    runs.py          a run followed by its events; taken up again when the connection breaks
    files.py         files and uploads, streamed, with progress
    sessions.py      ensure_session
    chat.py          agents: asked, followed, ended
    approvals.py     a person's yes or no to what they would do
    projects.py      directories of the host that they work in
    tools.py         their tools, called by a program
    records.py       what the service tells, as values
    failures.py      error bodies, back into errors
    checks.py        what cannot even be sent
    wire.py          requests: deadlines, retries, connections kept open
    connection.py    one connection of HTTP/1.1
    address.py       where a service is
    blocking.py      BlockingClient: the same without asyncio; blocking_agents.py is a part of it

Imports sbx.protocol, sbx.errors and sbx.sync.blocking, httptools, and nothing else that is not
Python's own: a program that only talks to a service starts quickly.
"""

from sbx.client.chat import ChatEvent
from sbx.client.client import Client
from sbx.client.records import ProjectInfo, RecordPage, SandboxInfo, Session
from sbx.client.sandbox import RemoteSandbox
from sbx.client.sessions import SessionCreateFailed, SessionNotReady

__all__ = [
    "ChatEvent",
    "Client",
    "ProjectInfo",
    "RecordPage",
    "RemoteSandbox",
    "SandboxInfo",
    "Session",
    "SessionCreateFailed",
    "SessionNotReady",
]
