"""Try a tool call on a copy before it takes effect, so that the user decides by its effect.

A sandbox over a project does that for every call (`begin`), other sandboxes only for
commands (`dry_run`). Both yield a `ChangeTrial`: the result, the changes, and functions that
commit or discard them.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec import Struct

from sbx.agent.sandbox import FileChange, ToolChanges, ToolDryRun, ToolSandbox
from sbx.agent.tools.approval_rules import COMMAND_TOOL
from sbx.agent.tools.results import cut
from sbx.agent.tools.tool import ToolResult
from sbx.aio import run_to_completion
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.protocol.agent import Json
from sbx.protocol.changes import ChangeBudget, ChangesSetting
from sbx.protocol.languages import full_name
from sbx.protocol.runs import Run

_OUTPUT_MAX = 8000  # characters of output in a question to the user

ReadSetting = Callable[[], Awaitable[ChangesSetting]]


async def ask_always() -> ChangesSetting:
    return ChangesSetting()


class ChangeTrial(Struct, frozen=True):
    """`shown` is the information for the user's decision. `is_empty` means that no file would
    change. `denied` is text for the model that follows a denial. `always_asked` means that a
    program of the host would obey a new file, so that no setting can replace the user's
    decision."""

    result: Callable[[], Awaitable[ToolResult]]
    shown: Json
    is_empty: bool
    within: Callable[[Sequence[ChangeBudget]], bool]
    commit: Callable[[], Awaitable[None]]
    discard: Callable[[], Awaitable[None]]
    denied: str = ""
    always_asked: bool = False

    def allowed_by(self, setting: ChangesSetting) -> bool:
        """Return whether this setting allows the changes without an approval."""
        return self.is_empty or setting.mode == "allow" or self.within(setting.allowances)

    async def committed(self) -> bool:
        """Commit the changes. Return False, without any change, if the workspace has changed since
        the trial or the copy is gone."""
        try:
            await run_to_completion(self.commit())
        except NotFound:
            return False
        except Conflict as error:
            if error.code != "workspace_changed":
                raise
            return False
        return True


async def compared(
    changes: ToolChanges, result: ToolResult, *, keeps_variables: bool
) -> ChangeTrial:
    """Return the trial of a call whose tool has acted on `changes.sandbox` and returned this
    result."""
    diff = await changes.compare()

    async def read_result() -> ToolResult:
        return result

    return ChangeTrial(
        read_result,
        _shown(diff.run, diff.changes, diff.truncated, diff.left_out, diff.host_executables),
        diff.is_empty,
        diff.within,
        changes.commit,
        changes.rollback,
        _KEPT if keeps_variables else _DROPPED,
        bool(diff.host_executables),
    )


def trial_from_dry_run(
    dry_run: ToolDryRun, result: Callable[[], Awaitable[ToolResult]]
) -> ChangeTrial:
    """Return the trial of a command that ran on a separate copy."""
    return ChangeTrial(
        result,
        _shown(dry_run.run, dry_run.changes, dry_run.truncated, dry_run.left_out),
        not dry_run.changes and not dry_run.truncated,
        lambda _allowances: False,
        dry_run.commit,
        dry_run.discard,
    )


_DROPPED = " It was tried on a copy of the project, and its changes of files were dropped."
_KEPT = (
    " The code ran on a copy of the project: its changes of files were dropped, and its variables"
    " are kept."
)


def _shown(
    run: Run | None,
    changes: Sequence[FileChange],
    truncated: bool,
    left_out: Sequence[str],
    host_executables: Mapping[str, str] | None = None,
) -> Json:
    shown: Json = {
        "status": "ok" if run is None else run.status.value,
        "exit_code": None if run is None else run.exit_code,
        "output": "" if run is None else cut(run.text, _OUTPUT_MAX),
        "changes": [asdict(change) for change in changes],
        "truncated": truncated,
        "left_out": list(left_out),
    }
    if host_executables:
        shown["host_executables"] = [
            {"path": path, "program": program} for path, program in host_executables.items()
        ]
    return shown


# -- dry runs of commands --------------------------------------------------------------------------

# Programs that always use the network, as a separate word anywhere in the command. A dry run has
# no network and would only show how they fail. Other programs that need it fail in the dry run.
_NETWORK = re.compile(
    r"(?<![\w./-])(?:curl|wget|ssh|scp|sftp|rsync|ftp|telnet|nc|ncat|ping|dig|nslookup"
    r"|git\s+(?:\S+\s+){0,8}?(?:clone|fetch|pull|push|ls-remote)"
    r"|(?:pip[\d.]*|uv|pipx|poetry|npm|npx|pnpm|yarn|cargo|go|gem|apt|apt-get|conda)"
    r"\s+(?:\S+\s+){0,8}?(?:install|download|add|get|sync|update|upgrade|ci|publish)"
    r"|npx)(?![\w.-])"
)


class DryRunCommand(Struct, frozen=True):
    text: str
    cwd: str | None
    timeout: float | None


def command_of(tool: str, arguments: Mapping[str, Any]) -> DryRunCommand | None:
    """Return the command that a call would run. Return None if the call is not a command or needs
    the network."""
    if tool != COMMAND_TOOL or needs_network(arguments["command"]):
        return None
    return DryRunCommand(arguments["command"], arguments.get("cwd"), arguments.get("timeout"))


def needs_network(command: str) -> bool:
    return _NETWORK.search(command) is not None


def reaches_out(arguments: Mapping[str, Any]) -> bool:
    """Return whether a command needs the network, which a copy does not have."""
    of_bash = full_name(arguments.get("language")) == "bash"
    command = arguments.get("code" if of_bash else "command")
    return isinstance(command, str) and needs_network(command)


async def dry_run_or_none(sandbox: ToolSandbox, command: DryRunCommand) -> ToolDryRun | None:
    """Dry-run the command. Return None if that is impossible: too large, too many, or no means.
    The user is then asked without a dry run, and an error in the call itself shows when it
    runs."""
    dry_run: Callable[..., Awaitable[ToolDryRun]] = getattr(sandbox, "dry_run")  # noqa: B009
    try:
        return await dry_run(command.text, timeout=command.timeout, cwd=command.cwd)
    except (BadRequest, Conflict, Unavailable):
        return None
