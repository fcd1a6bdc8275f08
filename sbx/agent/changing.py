"""Try a tool call on a copy before it takes effect, so that the user decides by its effect.

A sandbox over a project does that for every call (`KeepsChanges`), other sandboxes only for
commands (`SupportsDryRun`). Both yield a `ChangeTrial`: the result, the changes, and functions that
commit or discard them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from sbx.agent.sandbox import FileChange, ToolChanges, ToolDryRun
from sbx.agent.tools.results import cut
from sbx.agent.tools.tool import ToolResult
from sbx.aio import run_to_completion
from sbx.errors import Conflict, NotFound
from sbx.protocol.agent import Json
from sbx.protocol.changes import ChangesSetting
from sbx.protocol.runs import Run

_OUTPUT_MAX = 8000  # characters of output in a question to the user

ReadSetting = Callable[[], Awaitable[ChangesSetting]]


async def ask_always() -> ChangesSetting:
    return ChangesSetting()


@dataclass(frozen=True, slots=True)
class ChangeTrial:
    """`shown` is the information for the user's decision. `is_empty` means that no file would
    change. `denied` is text for the model that follows a denial. `always_asked` means that a
    program of the host would obey a new file, so that no setting can replace the user's
    decision."""

    result: Callable[[], Awaitable[ToolResult]]
    shown: Json
    is_empty: bool
    within: Callable[[Sequence[str]], bool]
    commit: Callable[[], Awaitable[None]]
    discard: Callable[[], Awaitable[None]]
    denied: str = ""
    always_asked: bool = False

    def allowed_by(self, setting: ChangesSetting) -> bool:
        """Return whether this setting allows the changes without an approval."""
        return self.is_empty or setting.mode == "allow" or self.within(setting.ask_outside)

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


def of_dry_run(dry_run: ToolDryRun, told: Callable[[], Awaitable[ToolResult]]) -> ChangeTrial:
    """Return the trial of a command that ran on a separate copy."""
    return ChangeTrial(
        told,
        _shown(dry_run.run, dry_run.changes, dry_run.truncated, dry_run.left_out),
        not dry_run.changes and not dry_run.truncated,
        lambda _prefixes: False,
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
