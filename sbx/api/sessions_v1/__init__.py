"""/api/v1: sessions, conversations, uploads and execution, as an agent platform speaks to sbx.

    models.py         its bodies, and how the runtime's values become them
    dependencies.py   the session, conversation and subdir that a request names
    sessions.py       sessions and their life; conversations, and the text for a system prompt
    files.py          uploads: up, listed, down, deleted
    runs.py           execute, interrupt, following a run
    login.py          a token as a cookie, for browsers

The rules of sessions are those of `sbx.service.sessions`. Beyond the bounds of a token, its scopes
too, everything here is 404.
"""

from sbx.api.sessions_v1 import files, login, runs, sessions

routers = (
    *(part.router for part in (sessions, files, runs, login)),
    sessions.of_conversations,
)

__all__ = ["routers", "runs"]
