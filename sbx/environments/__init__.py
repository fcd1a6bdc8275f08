"""Environments: Pythons with packages, made once on the host, that policies name as interpreter.

    {environments}/NAME/                 held by a lock (flock) while it is made or removed
        venv/                            what sandboxes are shown, read-only; nothing else is
        requirements.in                  what was asked for
        requirements.lock                name==version with hashes, as `pip --require-hashes` takes
        files.json                       what each file of venv/ was when it was made
        environment.json                 the record; an environment is there when this is

A virtual environment cannot be moved, so it is made where it will lie, and it is the record that is
renamed into place when all is whole. Whoever fails or is interrupted removes the directory; what a
killed one leaves has no record and no lock, and gives way to the next.

    record.py        what is told of one
    directory.py     those that there are: read, claimed, removed
    requirements.py  what may be asked for, and what a lock says
    pythons.py       the Pythons of this host
    step_runner.py   one command of a creation: its output, its deadline, its end
    installers.py    pip and uv
    create.py        the creation, step by step
    manifest.py      what a tree holds

Nothing here runs inside a sandbox, and nothing of a sandbox is read. Packages come from where pip
or uv are configured to look, by nothing of ours.
"""
