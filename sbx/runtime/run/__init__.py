"""One run: from the request to its result.

checks          checks a request
context         a kernel with its runs, as callers see it; contexts is the table of a conversation
executor        executes the runs of a context; execution is one of them, up to its result
context_kernel  the kernel of a context: its start, its use and its end
active_run      the events and the result of a run
termination     ends a run in steps, and derives the status and the cause of each end
stdin           the input of a command, and the answers to `input()`
frontend        a Jupyter frontend of a kernel
"""
