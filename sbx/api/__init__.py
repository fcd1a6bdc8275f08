"""HTTP over the runtime: thin routers, one REST surface each, and the only status numbers.

    socket → limits (id, sizes, slowness, errors) → CORS → routing → callers → router → runtime
                                                                       │
                              bay /v1 · sessions /api/v1 · native /v1 ─┘

    app.py           create_app: what is put together, and /health, /metrics
    middleware.py    the outermost layer: request ids, bounded headers and bodies, the last border
    errors.py        SbxError → status and body
    auth.py          who calls
    request_body.py  JSON that is read only once it is known who calls
    multipart.py     forms as they arrive; downloads.py: files as they leave
    sse.py           events as a stream
    bay/         /v1, as in Bay
    native/      /v1, what our own client needs beyond it
    sessions/    /api/v1
    server/server/serve.py  the process: settings, sockets, privileges, connections, the end

A router translates: names of its surface to words of the runtime, and back. It decides nothing that
another surface would have to decide again. Everything that comes in is hostile until it is a typed
value. May import: sbx.runtime and all below it, FastAPI, pydantic.
"""
