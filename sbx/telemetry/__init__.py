"""Information about a running sbx: logs, metrics, and the audit log.

    starts.py      counts of kernel starts
    audit.py       the audit log: append-only, hash-chained
    metrics.py     counters and timers → prometheus.py, once a service enables them
    logs.py        the service's log, as JSON or for a reader, with the ids of each request
    spans.py       spans of OpenTelemetry, if the program collects them
    background.py  contexts of tasks that outlive a request
    host_paths.py  errors without paths of the host, for tenants and models

Every module logs by `logging.getLogger(__name__)`, below the logger `sbx`. A library does not
configure logging; `sbx serve` and the command line do. Imports `errors` only.
"""
