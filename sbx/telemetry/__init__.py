"""What a program learns of a running sbx: logs, counts, and the audit log.

    starts.py   how kernels came to be
    audit.py    who did what: append-only, hash-chained
    metrics.py  what is counted and timed → collectors.py, once a service turns it on
    logs.py     the service's log, as JSON or for a person, with the ids of what it is about
    spans.py    spans of OpenTelemetry, where somebody collects them
    background.py   contexts of tasks that outlive a request
    host_paths.py   errors without paths of the host, for tenants and models

Every module logs by `logging.getLogger(__name__)`, below the logger `sbx`. A library does not
configure logging; `sbx serve` and the command line do. Imports `errors` only.
"""
