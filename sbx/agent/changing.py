"""Try a tool call on a copy before it takes effect, so that the user decides by its effect.

A sandbox over a project does that for every call (`begin`), other sandboxes only for
commands (`dry_run`). Both yield a `ChangeTrial`: the result, the changes, and functions that
commit or discard them. `TrialTurns` is the order of the trials of one answer.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec import Struct

from sbx.agent.sandbox import FileChange, ToolChanges, ToolDryRun, ToolSandbox
from sbx.agent.tools.approval_rules import COMMAND_TOOL
from sbx.agent.tools.results import cut, denied
from sbx.agent.tools.tool import ToolResult
from sbx.aio import run_to_completion
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.protocol.agent import Json
from sbx.protocol.approvals import Approval
from sbx.protocol.changes import TRIALS_MAX, ChangeBudget, ChangesSetting
from sbx.protocol.languages import full_name
from sbx.protocol.runs import Run

_OUTPUT_MAX = 8000  # characters of output in a question to the user

ReadSetting = Callable[[], Awaitable[ChangesSetting]]


async def ask_always() -> ChangesSetting:
    return ChangesSetting()


class ChangeTrial(Struct, frozen=True):
    """`shown` is the information for the user's decision. `is_empty` means that no file would
    change, and `paths` are those that would. `always_asked` means that a program of the host would
    obey a new file, so that no setting can replace the user's decision."""

    result: Callable[[], Awaitable[ToolResult]]
    shown: Json
    is_empty: bool
    within: Callable[[Sequence[ChangeBudget]], bool]
    commit: Callable[[], Awaitable[None]]
    discard: Callable[[], Awaitable[None]]
    paths: Collection[str] = ()
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


async def compared(changes: ToolChanges, result: ToolResult) -> ChangeTrial:
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
        diff.paths,
        bool(diff.host_executables),
    )


def denial(approval: Approval) -> ToolResult:
    """Return the result of a call that was denied without its run, which has ended."""
    assert approval.decision is not None
    return denied(approval.decision, "" if approval.dry_run is None else DROPPED)


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


# Follow a sentence about a call that was denied or that its run ended.
DROPPED = " It was tried on a copy, and its changes of files were dropped."
DROPPED_BUT_VARIABLES = (
    " The code ran on a copy: its changes of files were dropped, and its variables are kept."
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


# -- the order of trials ---------------------------------------------------------------------------


class TrialTurn:
    """The turn of one call, from `TrialTurns.enter` to `leave`. `changed`: its trial has changed
    files. `applied` are the paths that it has changed in the project."""

    def __init__(self, before: Sequence["TrialTurn"], *, parallel: bool) -> None:
        self.parallel = parallel
        self.changed = False
        self.applied: Collection[str] = ()
        self._before = before
        self._unseen: Sequence[TrialTurn] = ()
        self._over = asyncio.Event()

    async def may_try(self) -> None:
        """Wait until the call may be tried. The limit of trials in progress counts calls, so that a
        call that is tried again always gets the copy that it has given back."""
        beside = self._before[1 - TRIALS_MAX :] if self.parallel else ()
        for turn in self._before:
            if not (turn.parallel and turn in beside):
                await turn._over.wait()
        self.look()

    async def may_change(self) -> None:
        """Wait for the end of all earlier calls."""
        for turn in self._before:
            await turn._over.wait()

    def look(self) -> None:
        """Note that the call sees the files now, without later changes by earlier calls."""
        self._unseen = [turn for turn in self._before if not turn._over.is_set()]

    def conflicts(self, paths: Collection[str]) -> bool:
        """Return whether an earlier call has changed one of these paths, or a path above or below,
        since the trial."""
        return any(
            path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/")
            for turn in self._unseen
            for other in turn.applied
            for path in paths
        )

    @property
    def missed_changes(self) -> bool:
        """Return whether earlier calls have changes that this call did not see: they are applied
        now, or still wait for a decision."""
        return any(
            turn.applied or (turn.changed and not turn._over.is_set()) for turn in self._unseen
        )

    def leave(self) -> None:
        self._over.set()


class TrialTurns:
    """The calls of one answer that are tried on copies, in their order. `parallel` calls that
    follow each other are tried at the same time. Any other call sees the changes of all calls
    before it. Decisions and changes come one at a time, in the order of the calls."""

    def __init__(self) -> None:
        self._turns: list[TrialTurn] = []

    def enter(self, *, parallel: bool = False) -> TrialTurn:
        turn = self.read()
        turn.parallel = parallel
        self._turns.append(turn)
        return turn

    def read(self) -> TrialTurn:
        """Return the turn of a call that only reads: it waits for no call, and none for it."""
        turn = TrialTurn(tuple(self._turns), parallel=True)
        turn.look()
        return turn


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
