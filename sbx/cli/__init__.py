"""The command line interface `sbx`. It uses the same core as the embedded API.

    app.py                            the commands; turns every error into a message and an exit
                                      code
    exits.py                          all exit codes
    run.py                            sbx run      → run_session.py (one sandbox, one run, signals)
                                      → figures.py
    exec_.py                          sbx exec     → run_driver.py (one run in a sandbox of the
                                      service, signals)
    run_printer.py                    follows a run: shows its events with output.py, answers its
                                      questions
    agent.py                          sbx agent    → task.py (one task, signals), save_files.py (its
                                      files)
    chat.py                           sbx chat     → chatting.py (lines, answers, commands) →
                                      approval_prompt.py (approvals), undo.py; talks.py →
                                      talk_here.py, chat_store.py (stored conversations)
    mcp.py                            sbx mcp
    agent_output.py                   prints the events of an agent
    agent_model.py, agent_sandbox.py  the model and the sandbox of an agent
    signals.py                        signal handling for agent, chat and mcp
    sandboxes.py sbx ps, create, stop, rm, extend, inspect
    cp.py        sbx cp
    records.py   sbx logs, history
    key.py       sbx key, token
    gc.py        sbx gc, audit
    connect.py   connects these commands to the service, with sbx.client
    serve.py     sbx serve;  config.py  sbx config
    doctor.py    sbx doctor   → doctor/host_check.py (the capabilities of this host, and a live
                 check)
    policy.py    sbx policy   → toml.py
    moments.py   formats times for people
    report.py    prints results and errors, for people or (with --json) for programs
    terminal.py  cleans text before it is written to a terminal, and reads typed input

stdout carries data and stderr carries messages. Output of a sandbox may contain any bytes:
`terminal.scrub` replaces its control characters before they reach a terminal or a log.

Each command imports its dependencies when it runs, so that `sbx --help` is fast. `sbx ps` never
imports IPython, FastAPI or the runtime. May import: api, client, runtime and all below, typer,
rich.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raise, and never show a traceback of sbx."""
    try:
        from sbx.cli.app import run_command

        return run_command(arguments)
    except KeyboardInterrupt:  # during the imports, before `exits` is available
        print("error: interrupted", file=sys.stderr)
        return 130
