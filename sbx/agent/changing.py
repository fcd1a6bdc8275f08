"""A tool call tried before it is real: on a copy, so that a person decides by its effect.

A sandbox over a project does that for every call (`KeepsChanges`), others for commands only
(`Rehearses`). Both give a `Trial`: the result, the changes, and a way to make or to drop them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from sbx.agent.sandbox import Changes, FileChange, Rehearsal
from sbx.agent.tools.results import cut
from sbx.agent.tools.tool import ToolResult
from sbx.errors import Conflict, NotFound
from sbx.isolation.patience import to_the_end
from sbx.protocol.agent import Json
from sbx.protocol.changes import ChangesSetting
from sbx.protocol.runs import Run

_OUTPUT_MAX = 8000  # characters that a person is shown

ReadSetting = Callable[[], Awaitable[ChangesSetting]]


async def ask_always() -> ChangesSetting:
    return ChangesSetting()


@dataclass(frozen=True, slots=True)
class Trial:
    """`shown` is what a person decides by; `is_empty`: no file would change. `denied` is what the
    model is told beside a no. `always_asked`: a program of the host would obey a new file, and no
    setting answers for a person."""

    result: Callable[[], Awaitable[ToolResult]]
    shown: Json
    is_empty: bool
    within: Callable[[Sequence[str]], bool]
    commit: Callable[[], Awaitable[None]]
    discard: Callable[[], Awaitable[None]]
    denied: str = ""
    always_asked: bool = False

    def allowed_by(self, setting: ChangesSetting) -> bool:
        """Whether these changes are made without a question."""
        return self.is_empty or setting.mode == "allow" or self.within(setting.ask_outside)

    async def committed(self) -> bool:
        """Make the changes; False where the workspace has changed since, or the copy is gone, and
        nothing was done."""
        try:
            await to_the_end(self.commit())
        except NotFound:
            return False
        except Conflict as error:
            if error.code != "workspace_changed":
                raise
            return False
        return True


async def compared(changes: Changes, result: ToolResult, *, keeps_variables: bool) -> Trial:
    """The trial of a call whose tool has acted on `changes.sandbox`, and gave this result."""
    there = await changes.compare()

    async def told() -> ToolResult:
        return result

    return Trial(
        told,
        _shown(there.run, there.changes, there.truncated, there.left_out, there.host_executables),
        there.is_empty,
        there.within,
        changes.commit,
        changes.rollback,
        _KEPT if keeps_variables else _DROPPED,
        bool(there.host_executables),
    )


def of_rehearsal(rehearsal: Rehearsal, told: Callable[[], Awaitable[ToolResult]]) -> Trial:
    """The trial of a command that was run on a copy of its own."""
    return Trial(
        told,
        _shown(rehearsal.run, rehearsal.changes, rehearsal.truncated, rehearsal.left_out),
        not rehearsal.changes and not rehearsal.truncated,
        lambda _prefixes: False,
        rehearsal.commit,
        rehearsal.discard,
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
