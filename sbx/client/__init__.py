"""Sandboxes of a service, from another process: the methods and errors of the embedded API.

    client                Client: one service
    sandbox               RemoteSandbox, with the methods of AsyncSandbox
    conversation          RemoteConversation: runs, start and stop
    runs                  a run and its events; it is resumed after a lost connection
    commands, terminals   background commands and terminals
    files                 files and uploads, streamed, with progress
    sessions              ensure_session
    agents                chats with agents, approvals, projects, tools
    operator              keys, tokens, clean-up
    requests              the requests that Client and its parts make
    records               replies of the service as values; errors: error bodies as exceptions
    http                  requests: deadlines, retries, pooled connections (http_connection)
    address               where a service is

May import: sbx.protocol, sbx.aio, sbx.errors and httptools: a program that only uses a service
starts quickly.
"""

from sbx.client.agents import ChatEvent
from sbx.client.client import Client
from sbx.client.records import ProjectInfo, SandboxInfo, Session
from sbx.client.sandbox import RemoteSandbox
from sbx.client.sessions import SessionCreateFailed, SessionNotReady
from sbx.protocol.pages import Page

__all__ = [
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
