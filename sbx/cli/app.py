"""Load the commands of `sbx`, and turn every error into a message and an exit code."""

import contextlib
import functools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from sbx import __version__, errors
from sbx.cli import broker_ahead, exits, output, terminal

P = ParamSpec("P")
# Each command is the module of its name, in the order of `sbx --help`. Its module is imported when
# it runs. To build the parser of all commands takes 100 ms.
_GROUPS = {
    "Run code here": ("run", "agent", "task", "tool", "chat", "mcp", "kernelspec", "quarantine"),
    "This host": ("doctor", "policy", "env", "config", "version"),
    "Sandboxes of a service": (
        "create", "ps", "exec", "shell", "cp", "logs", "history", "rerun", "inspect", "stats",
        "stop", "rm", "extend", "grant", "context", "command", "port", "project", "console", "runs",
    ),
    "Operate a service": (
        "serve", "connect", "key", "token", "mount", "unmount", "unfreeze", "forget", "gc",
        "audit", "metrics", "store",
    ),
}  # fmt: skip
_COMMANDS = tuple(name for names in _GROUPS.values() for name in names)
_ALIASES = {"ls": "ps", "list": "ps"}
_MODULES = {"connect": "connect_sdk", "exec": "exec_", "unmount": "mount"}
# The extra of each command that needs more packages than the core has.
_EXTRAS = {
    "agent": "agent",
    "chat": "agent",
    "config": "serve",
    "env": "env",
    "kernelspec": "jupyter",
    "mcp": "mcp",
    "serve": "serve",
    "task": "agent",
    "tool": "agent",
}


def _interruptible(command: Callable[P, int]) -> Callable[P, int]:
    """Report Ctrl-C before a run has started. typer would exit without a message."""

    @functools.wraps(command)
    def interruptible(*args: P.args, **options: P.kwargs) -> int:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            raise exits.StoppedBySignal(signal.SIGINT, "interrupted") from None

    return interruptible


def version() -> int:
    """Print the version."""
    about = "sbx-runtime: sandboxes for the code of AI agents"
    terminal.write(terminal.STDOUT, f"sbx {__version__} ({about})\n")
    return exits.Exit.OK


def _version(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit


class _Groups(TyperGroup):
    """Show the commands of `sbx --help` in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, _COMMANDS))
        for title, names in _GROUPS.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(formatter.width - 20))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _sbx(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Run code that an AI agent wrote, in a sandbox on this machine."""


@functools.cache
def _parser(command: str) -> TyperGroup:
    """Return the parser of one command, or of all commands for an unknown one."""
    app = typer.Typer(
        cls=_Groups,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,  # plain help: for people and models alike, and twice as fast
        pretty_exceptions_enable=False,
        epilog=exits.EPILOG,
    )
    app.callback()(_sbx)
    for name in (command,) if command in _COMMANDS else _COMMANDS:
        if name == "version":
            app.command(name)(version)
            continue
        module = import_module(f"sbx.cli.{_MODULES.get(name, name)}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            function = getattr(module, "execute" if name == "exec" else name)
            app.command(name)(_interruptible(function))
    parser = typer.main.get_command(app)
    assert isinstance(parser, TyperGroup)
    return parser


def run_command(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    words[0] = _ALIASES.get(words[0], words[0])
    as_json = "--json" in words or "--events" in words
    if not os.environ.get("SBX_DEBUG"):
        # An error is printed once, as one message. Without a handler, logging prints it again.
        logging.getLogger().addHandler(logging.NullHandler())
    try:
        extra = _EXTRAS.get(words[0])
        if extra is None and words[0] != "console":  # pydantic reads the metadata of all packages
            os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        with errors.needs_extra(f"sbx {words[0]}", extra) if extra else contextlib.nullcontext():
            command = "version" if words[0] == "--version" else words[0]
            with broker_ahead.of(words) as broker:
                code = _parser(command)(words, prog_name="sbx", standalone_mode=False, obj=broker)
        return int(code or exits.Exit.OK)
    except exits.ReaderGone as error:
        return exits.for_error(error)
    except errors.SbxError as error:
        output.error(error, as_json=as_json)
        return exits.for_error(error)
    except typer.TyperException as error:
        output.error(_usage(error), as_json=as_json)
        return exits.Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):  # at a question, or before the command began
        output.error(exits.StoppedBySignal(signal.SIGINT, "interrupted"), as_json=as_json)
        return exits.Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001  # the boundary: any other error is a bug of sbx
        if os.environ.get("SBX_DEBUG"):
            traceback.print_exc()
        output.error(_bug(error), as_json=as_json)
        return exits.Exit.BROKEN


def _usage(error: typer.TyperException) -> errors.BadRequest:
    message = error.format_message().removesuffix(".")
    context: typer.Context | None = getattr(error, "ctx", None)
    command = "sbx" if context is None else context.command_path
    return errors.BadRequest(
        message[:1].lower() + message[1:], code="usage", hint=f"{command} --help shows the usage"
    )


def _bug(error: Exception) -> errors.Broken:
    return errors.Broken(
        f"sbx itself failed: {type(error).__name__}: {error}",
        hint="set SBX_DEBUG=1 to see the traceback, and report it",
    )
