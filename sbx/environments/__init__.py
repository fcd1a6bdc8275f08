"""Environments: Pythons with packages, created once on the host, that policies name as interpreter.

    {environments}/NAME/                 locked (flock) while it is created or removed
        venv/                            visible in sandboxes, read-only; nothing else is
        requirements.in                  the requested packages
        requirements.lock                name==version with hashes, for `pip --require-hashes`
        files.json                       the hash of each file of venv/ at its creation
        environment.json                 the record; the environment exists when this file does

A virtual environment cannot be moved, so it is created at its final place, and the record is
renamed into place at the end. A creation that fails or is interrupted removes the directory. A
killed one leaves a directory without record and lock, which the next creation removes.

    record.py        the record of an environment
    directory.py     all environments: read, claim, remove, find their users
    requirements.py  valid requirements, and the lock
    pythons.py       the Pythons of this host
    step_runner.py   one command of a creation: its output, its deadline, its end
    installers.py    pip and uv
    create.py        the creation, step by step
    manifest.py      the files of a tree and their hashes

Nothing here runs inside a sandbox or reads files of one. Packages come from the sources that the
configuration of pip or uv names; sbx does not change it.
"""
