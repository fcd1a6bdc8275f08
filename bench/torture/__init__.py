"""torture: clients work on a real `sbx serve` under faults, and a checker compares the end with the
replies.

    ledger.py       the records: acts of clients, lives of the service, faults, samples
    oracle.py       the checker: records in, findings out; pure
    growth.py       slopes of memory and descriptors for each life of the service; pure
    plan.py         which fault strikes when; pure
    service_process.py  the service process, its small file system, its restarts
    faults.py       the faults
    wire.py         one HTTP call and its record
    looks.py        requests that only look
    clients.py      the work of one client
    model.py        the model server that agents of the service ask
    survey.py       the state at the end, read over HTTP and from the host
    command.py      the command: one run and its report

The order of a run: serve, work under faults, heal, survey, restart, survey again, end, look for
leftovers, judge.
"""
