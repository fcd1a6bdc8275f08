"""One run: from the request to its result.

checks       checks a request
context      a kernel with its queue of runs; contexts is the table of a conversation
active_run   a run that is queued or runs: its events and its result; relay forwards them
termination  ends a run in steps: interrupt, then kill; verdict derives the status from the end
stdin        the input of a command; questions passes `input()` to the caller
frontend     a Jupyter frontend of a kernel; between reads output between two runs
"""
