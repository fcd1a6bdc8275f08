"""HTTP over the service: thin routers, one REST surface each. Only this package knows status codes.

    socket → limits (ids, sizes, rates, errors) → CORS → routing → caller → router → service
                                                                     │
                              v1 · v1/bay · sessions_v1 · agent_v1 ──┘

    app           create_app: the routers, /health, /metrics
    middleware    the outermost layer: request ids, limits of headers and bodies, the last handler
    admission     which connections may be open
    errors        SbxError → status and body
    auth          the caller of a request
    bodies        bodies that several surfaces share, and how a route reads a body by itself
    encoding      runs and events as JSON
    multipart     forms as they arrive
    downloads     files and archives as they leave
    sse           streams of events
    slots         how many uploads, downloads and followers an owner may have at once
    v1/           /v1: the resources of sbx; v1/bay/ has Bay's routes and words
    sessions_v1/  /api/v1: sessions of an agent platform
    agent_v1/     /api/v1: agents
    server/       the process: settings, sockets, privileges, protocols

A router decodes, calls the service and encodes. It makes no decision that another surface would
have to repeat. All input is hostile until it is a typed value. May import: sbx.service and lower
packages except sbx.store, FastAPI, pydantic.
"""
