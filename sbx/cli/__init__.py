"""The command line interface `sbx`. It uses the same core as the embedded API.

    app.py         loads a command; turns every error into a message and an exit code
    exits.py       all exit codes
    output.py      messages, results, tables and times
    run_output.py  the events of a run
    terminal.py    cleans text before it is written to a terminal, and reads typed input
    connect.py     connects a command to the service, with sbx.client
    signals.py     SIGINT, SIGTERM and SIGHUP
    broker_ahead.py  the broker of `sbx run`, started before the command line is parsed
    local_runtime.py  the runtime of a command that runs code in this process
    run_driver.py  one run of `sbx run` or `sbx exec`: its events, its questions, its signals

Each command is the module of its name (exec_.py is `sbx exec`). Other files:

    agent_options.py                  the model and the sandbox of agent, chat and mcp
    agent_output.py                   prints the events of an agent
    agent_task.py                     one task of an agent, for `sbx agent run` and `sbx task run`
    chat_loop.py, chat_store.py       the loop of a chat, and its stored conversations
    approval_prompt.py, undo.py       the approvals and `/undo` of a chat
    shell_session.py, raw_tty.py      a terminal of a sandbox in the user's terminal
    escape_filter.py                  filters the escape sequences of that terminal
    save_files.py                     saves figures and the files of an agent
    cp_recursive.py                   `sbx cp -r`
    host_executables.py               the files that it leaves out
    env_progress.py                   the progress of `sbx env create`

stdout carries data and stderr carries messages. Output of a sandbox may contain any bytes:
`terminal.scrub` replaces its control characters before they reach a terminal or a log.

Only the module of the requested command is imported, and it imports its dependencies when it runs.
`sbx ps` never imports IPython, FastAPI or the runtime. May import: api, client, runtime and all
below, typer, rich.
"""

import os
import sys
from collections.abc import Sequence
from gc import freeze, set_threshold  # not `gc`: that is the command, once it is imported

# Imports make 100,000 objects that stay. At 700, the threshold of Python, collections take 45 ms of
# the 500 of `sbx run`. `sbx serve` sets other thresholds.
_COLLECTED_AFTER = 50_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raise, and never show a traceback of sbx."""
    if arguments is None:  # this process is ours
        set_threshold(_COLLECTED_AFTER, 2, 2)
        _open_standard_files()
    try:
        from sbx.cli.app import run_command

        return run_command(arguments)
    except KeyboardInterrupt:  # during the imports, before `exits` is available
        print("error: interrupted", file=sys.stderr)
        return 130
    finally:
        if arguments is None:  # at its end, Python would look for garbage twice, for 45 ms
            freeze()


def _open_standard_files() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr. Otherwise a socket of sbx could
    have its number, and answers would be read from there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
