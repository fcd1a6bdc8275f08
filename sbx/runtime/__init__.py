"""What exists right now, and for how long: runtimes, sandboxes, conversations, runs.

    settings.py      what an operator may choose
    runtime.py       Runtime: one broker, one data directory, the sandboxes of one process
    sandbox.py       AsyncSandbox: what a caller owns; sequences, and does not know how
    conversation.py  one workspace and at most one live kernel; runs in their order
    request.py       what a call may ask for, checked before anything is started
    live.py          a run while it goes on: its events so far, and its result at the end
    stop.py          the ladder: interrupt, then kill
    questions.py     `input()` inside, answered by a function of the caller's
    verdict.py       how a run ended, decided from what was seen
    disk.py          what stands in for a disk quota
    files.py         the files of a conversation, in worker threads
    data.py          where a runtime's workspaces lie, held by a lock
    blocking.py      Sandbox: the same without asyncio, over one runtime per process
    interpreter.py   which Python a policy's kernels run, and what it needs to be shown

May import: everything below it (kernels, isolation, workspace, policy, protocol, errors).
"""
