"""Finds the route of a call without trying them all one after the other.

It stands before them: by method and number of segments it tries the few that can match, in their
order. What it does not find (another method, no such path, a WebSocket) goes on to the routes
themselves, which say what is wrong.
"""

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send


class Index(BaseRoute):
    """An index of `routes`. One whose path may have any number of segments is not in it, and so
    comes after all others."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: dict[tuple[str, int], list[APIRoute]] = {}
        for route in routes:
            if not isinstance(route, APIRoute) or ":path}" in route.path:
                continue
            for method in route.methods or ():
                self._routes.setdefault((method, route.path.count("/")), []).append(route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http":
            for route in self._routes.get((scope["method"], scope["path"].count("/")), ()):
                match, child = route.matches(scope)
                if match is Match.FULL:
                    return match, child  # in which FastAPI names the route
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].handle(scope, receive, send)
