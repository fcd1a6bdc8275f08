"""Sandboxes of a service, from another process: the methods and errors of the embedded API.

    client                Client: one service, with the calls of its operator
    sandbox               RemoteSandbox, with the methods of AsyncSandbox
    conversation          RemoteConversation: runs, dry runs, usage, start and stop
    conversation_calls    the requests of a conversation and its contexts
    contexts, dry_runs    the kernels of a conversation; dry runs and checkpoints
    runs                  a run and its events; it is resumed after a lost connection
    commands, terminals   background commands; terminals (terminal_socket: one client of a terminal)
    files                 files and uploads, streamed, with progress (transfers)
    sessions              ensure_session
    agents                chats with agents, approvals, projects, tools
    console               conversations with agents, logins of browsers, templates, policies
    requests              the requests that Client makes
    records               records of the service as values
    errors                error bodies as exceptions
    http                  requests: deadlines, retries, pooled connections (http_connection)
    replies               replies: complete, in pieces, as events
    address               the address of a service
    checks                checks before a request is sent

May import: sbx.protocol, sbx.aio, sbx.event_log, sbx.run_methods, sbx.errors and httptools. A
program that only uses a service must start quickly: it imports neither pydantic nor msgspec.
"""

from sbx.client.agents import ChatEvent
from sbx.client.client import Client
from sbx.client.console import AgentConversation
from sbx.client.records import ProjectInfo, SandboxInfo, Session
from sbx.client.sandbox import RemoteSandbox
from sbx.client.sessions import SessionCreateFailed, SessionNotReady
from sbx.protocol.pages import Page

__all__ = [
    "AgentConversation",
    "ChatEvent",
    "Client",
    "Page",
    "ProjectInfo",
    "RemoteSandbox",
    "SandboxInfo",
    "Session",
    "SessionCreateFailed",
    "SessionNotReady",
]
