"""The command `sbx`: one face over the same core as the embedded API.

    app.py       the commands, and the border where every error becomes a sentence and an exit code
    exits.py     the exit codes, in one place
    run.py       sbx run      → session.py (one sandbox, one run, signals) → figures.py
    execute.py   sbx exec     → visit.py (one run in a sandbox of the service, signals)
    following.py a run that goes on: shown on screen.py, its questions answered
    agent.py     sbx agent    → task.py (one task, signals), saving.py (what it wrote)
    chat.py      sbx chat     → chatting.py (lines, answers, commands) → asking.py (approvals),
                 undo.py; talks.py → talk_here.py, talk.py (where conversations are kept)
    mcp.py       sbx mcp
    telling.py   an agent's events, as shown;  agent_model.py, agent_sandbox.py  what it works with
    ending.py    what signals do to these three
    sandboxes.py sbx ps, create, stop, rm, extend, inspect
    transfer.py  sbx cp
    records.py   sbx logs, history
    access.py    sbx key, token
    upkeep.py    sbx gc, audit
    reach.py     how all of these reach the service, through sbx.client
    serve.py     sbx serve;  config.py  sbx config
    doctor.py    sbx doctor   → examine.py (what this host can do, and a live check)
    policy.py    sbx policy   → toml.py
    moments.py   times as a person reads them
    report.py    what a person or, with --json, a program is told
    terminal.py  what may reach a terminal, and what is read from it

stdout is data and stderr is messages. What comes out of a sandbox may hold anything: a control
character never reaches a terminal or a log as it is, see `terminal.scrub`.

`sbx --help` is to be quick, so what a command needs is imported when it runs; `sbx ps` never sees
IPython, FastAPI or the runtime. May import: api, client, runtime and all below, typer, rich.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Never raises, and never shows a traceback of ours."""
    try:
        from sbx.cli.app import run_command

        return run_command(arguments)
    except KeyboardInterrupt:  # while the imports go on, not even `exits` is there
        print("error: interrupted", file=sys.stderr)
        return 130
