"""The context of a task or a timer that outlives the request that starts it.

asyncio copies the context of the caller into each task, timer and reader, and the ids of log lines
lie in that context (`logs`). A line that such a task writes later is not about that request. Work
of the pool is about no sandbox either: it begins in an empty `contextvars.Context`.
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
