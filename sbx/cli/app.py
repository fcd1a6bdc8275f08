"""Register the commands of `sbx`, and turn every error into a message and an exit code."""

import contextlib
import functools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, ParamSpec

import typer
from typer.core import TyperGroup

from sbx import __version__, errors
from sbx.cli import (
    agent,
    chat,
    command,
    config,
    context,
    cp,
    doctor,
    env,
    exec_,
    exits,
    gc,
    kernelspec,
    key,
    mcp,
    mount,
    policy,
    quarantine,
    records,
    report,
    run,
    sandboxes,
    serve,
    shell,
    stats,
    store,
    terminal,
)

P = ParamSpec("P")
# The commands that need more packages than the core has, with their extra.
_EXTRAS = {
    "agent": "agent",
    "chat": "agent",
    "config": "serve",
    "env": "env",
    "kernelspec": "jupyter",
    "mcp": "mcp",
    "serve": "serve",
}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # plain help: for people and models alike, and twice as fast
    pretty_exceptions_enable=False,
    epilog=exits.EPILOG,
)


def _interruptible(command: Callable[P, int]) -> Callable[P, int]:
    """Report Ctrl-C before a run has started. typer would exit without a message."""

    @functools.wraps(command)
    def interruptible(*args: P.args, **options: P.kwargs) -> int:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            raise exits.StoppedBySignal(signal.SIGINT, "interrupted") from None

    return interruptible


app.command()(_interruptible(run.run))
app.command()(_interruptible(agent.agent))
app.command()(_interruptible(chat.chat))
app.command()(_interruptible(mcp.mcp))
app.command()(_interruptible(doctor.doctor))
app.add_typer(policy.app, name="policy")
app.add_typer(env.app, name="env")
app.add_typer(quarantine.app, name="quarantine")
app.add_typer(kernelspec.app, name="kernelspec")
app.command()(_interruptible(serve.serve))
app.command()(config.config)
app.command()(_interruptible(sandboxes.ps))
app.command()(_interruptible(sandboxes.create))
app.command("exec")(_interruptible(exec_.execute))
app.command()(_interruptible(shell.shell))
app.add_typer(context.app, name="context")
app.add_typer(command.app, name="command")
app.command()(_interruptible(stats.stats))
app.command()(_interruptible(cp.cp))
app.command()(_interruptible(records.logs))
app.command()(_interruptible(records.history))
app.command()(_interruptible(sandboxes.inspect))
app.command()(_interruptible(sandboxes.stop))
app.command()(_interruptible(sandboxes.rm))
app.command()(_interruptible(sandboxes.extend))
app.command()(_interruptible(mount.mount))
app.command()(_interruptible(mount.unmount))
app.command()(_interruptible(mount.unfreeze))
app.add_typer(key.keys, name="key")
app.add_typer(key.tokens, name="token")
app.command()(_interruptible(gc.gc))
app.add_typer(gc.audit, name="audit")
app.add_typer(store.app, name="store")


def _version(requested: bool) -> None:
    if requested:
        terminal.write(terminal.STDOUT, f"sbx {__version__}\n")
        raise typer.Exit


@app.callback()
def _sbx(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Run code that an AI agent wrote, in a sandbox on this machine."""


@functools.cache
def _parser() -> TyperGroup:
    """Return the parser of all commands. It takes 50 ms to build, and a program may run several."""
    parser = typer.main.get_command(app)
    assert isinstance(parser, TyperGroup)
    return parser


def run_command(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in words or "--events" in words
    if not os.environ.get("SBX_DEBUG"):
        # An error is printed once, as one message. Without a handler, logging prints it again.
        logging.getLogger().addHandler(logging.NullHandler())
    try:
        extra = _EXTRAS.get(words[0])
        with errors.needs_extra(f"sbx {words[0]}", extra) if extra else contextlib.nullcontext():
            code = _parser()(words, prog_name="sbx", standalone_mode=False)
        return int(code or exits.Exit.OK)
    except exits.ReaderGone as error:
        return exits.for_error(error)
    except errors.SbxError as error:
        report.error(error, as_json=as_json)
        return exits.for_error(error)
    except typer.TyperException as error:
        report.error(_usage(error), as_json=as_json)
        return exits.Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return exits.Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001  # the boundary: any other error is a bug of sbx
        if os.environ.get("SBX_DEBUG"):
            traceback.print_exc()
        report.error(_bug(error), as_json=as_json)
        return exits.Exit.BROKEN


def _usage(error: typer.TyperException) -> errors.BadRequest:
    message = error.format_message().removesuffix(".")
    return errors.BadRequest(
        message[:1].lower() + message[1:], code="usage", hint="sbx --help, sbx COMMAND --help"
    )


def _bug(error: Exception) -> errors.Broken:
    return errors.Broken(
        f"sbx itself failed: {type(error).__name__}: {error}",
        hint="set SBX_DEBUG=1 to see the traceback, and report it",
    )
