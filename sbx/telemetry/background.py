"""The context of a task or a timer that outlives the request that starts it.

asyncio copies the context of the caller into each task, timer and reader. This context contains the
ids of log lines (`logs`). A line that such a task writes later does not belong to that request.
Work of the pool does not belong to any sandbox either: it starts in an empty `contextvars.Context`.
"""

from contextvars import Context, copy_context

_OF_A_CALL = ("structlog_request", "structlog_run")  # structlog's variables for ids of `logs`


def background_context() -> Context:
    """Return a copy of the current context without the request and the run."""
    context = copy_context()
    for variable in context:
        if variable.name in _OF_A_CALL:
            context.run(variable.set, ...)  # structlog's mark for an id that is not bound
    return context
